"""Where experts should live, from how many tokens each got: expert placement by load ("EPLB").

R ranks divide E experts. A rank may have r slots more than its share, for copies of popular ones:

    slots of rank i   s_i = E // R + (i < E % R) + r        S = sum(s_i)
    copies of e       n_e >= 1, on n_e different ranks      sum(n_e) = S
    load of a slot    l_e / n_e, since an expert's tokens are spread evenly over its copies
    load of a rank    the sum over its slots; a layer waits for the largest

1. Copies go, one at a time, to the expert with the largest l_e / n_e: no other n has a smaller
   largest load of a slot.
2. Slots go, heaviest first, to the lightest rank that has room and not the expert yet.
3. Exchanges of two slots between the heaviest rank and another, while that lowers the larger load.

`balance_groups` does that inside each node, after whole groups of experts were given to nodes, for
models whose tokens choose few groups (DeepSeek's node-limited routing). Everything is a function of
its arguments: ties go to the lower number, so all ranks that know the same loads find the same.

Source of the problem and of steps 1 and 2: DeepSeek-V3's report, arXiv 2412.19437, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..checks import expect, expect_type
from ..routing import ExpertLoad
from .placement import Placement

Bins = tuple[tuple[int, ...], ...]  # of each rank, its experts
Loads = ExpertLoad | Tensor | Sequence[float]

MOST_EXCHANGES = 1000


def slot_counts(num_experts: int, ranks: int, redundant: int) -> list[int]:
    """s_i above."""
    share, rest = divmod(num_experts, ranks)
    return [share + (rank < rest) + redundant for rank in range(ranks)]


def balance(
    loads: Loads, ranks: int, *, redundant: int = 0, current: Placement | None = None
) -> Placement:
    """Experts spread over all ranks alike.

    Args:
        loads: of each expert, (E,): counts of its tokens, as `tmoe.watch_load` has them, or any
            numbers >= 0. Reads the device once.
        ranks: R. redundant: r, slots of each rank beyond its share of the experts.
        current: where the experts live now, with the same slots per rank. The ranks' numbers are
            then chosen, and the slots kept, so that few weights have to move.

    Without copies, the largest load of a rank is never above that of `Placement.contiguous`. Raises
    ``TypeError`` and ``ValueError``: a negative or infinite load, more ranks than experts, more
    slots on a rank than there are experts, a `current` of another shape.
    """
    values = _values(loads, "balance")
    E = len(values)
    _expect_sizes("balance", E, ranks, redundant)
    room = slot_counts(E, ranks, redundant)
    if current is not None:
        _expect_current(current, room, E, "balance")
    copies = replicate(values, sum(room), ranks)
    found = Placement(E, pack(values, copies, room))
    plain = Placement.contiguous(E, ranks)
    if redundant == 0 and heaviest(values, plain) <= heaviest(values, found):
        found = plain
    return found if current is None else _near(found, current, [[*range(ranks)]])


def balance_groups(
    loads: Loads,
    ranks: int,
    *,
    groups: int,
    nodes: int,
    redundant: int = 0,
    current: Placement | None = None,
) -> Placement:
    """As `balance`, with all experts of a group, and their copies, on ranks of one node.

    groups: equal groups of neighbouring experts (`Routing.n_group`). nodes: each has the same
    number of ranks, `nodes` divides `groups`. A token that chooses few groups is sent to few nodes.
    """
    op = "balance_groups"
    values = _values(loads, op)
    E = len(values)
    _expect_sizes(op, E, ranks, redundant)
    expect_type(groups, int, op, "groups")
    expect_type(nodes, int, op, "nodes")
    expect(groups >= 1 and E % groups == 0, op, "groups", f"a divisor of {E} experts", groups)
    fits = nodes >= 1 and groups % nodes == 0
    expect(fits, op, "nodes", f"a divisor of groups={groups}; without groups, use balance", nodes)
    expect(ranks % nodes == 0, op, "nodes", f"a divisor of ranks={ranks}", nodes)
    in_group, in_node, R = E // groups, E // nodes, ranks // nodes
    _expect_sizes(op, in_node, R, redundant)
    sums = [sum(values[g * in_group : (g + 1) * in_group]) for g in range(groups)]
    of_nodes = pack(sums, [1] * groups, [groups // nodes] * nodes)
    if current is not None:
        _expect_current(current, slot_counts(in_node, R, redundant) * nodes, E, op)
    found: list[tuple[int, ...]] = []
    for node in of_nodes:
        experts = sorted(e for g in node for e in range(g * in_group, (g + 1) * in_group))
        own = balance([values[e] for e in experts], R, redundant=redundant)
        found += [tuple(experts[place] for place in rank) for rank in own.ranks]
    placement = Placement(E, tuple(found))
    if current is None:
        return placement
    return _near(placement, current, [[*range(n * R, n * R + R)] for n in range(nodes)])


def replicate(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """n_e: how often each expert is there, `slots` times in all and at most once on each rank."""
    copies = [1] * len(loads)
    for _ in range(slots - len(loads)):
        more = [e for e, count in enumerate(copies) if count < ranks]
        copies[max(more, key=lambda e: (loads[e] / copies[e], -copies[e], -e))] += 1
    return copies


def pack(loads: Sequence[float], copies: Sequence[int], room: Sequence[int]) -> Bins:
    """Put `copies` of each item, of load l / n each, into bins that must become full, no item twice
    into a bin. The sizes of bins differ by one at most. Heaviest first, then exchanges."""
    share = [load / count for load, count in zip(loads, copies, strict=True)]
    bins: list[list[int]] = [[] for _ in room]
    sums = [0.0] * len(room)
    for item in sorted(range(len(loads)), key=lambda i: (-share[i], i)):
        for _ in range(copies[item]):
            free = [b for b, own in enumerate(bins) if len(own) < room[b]]
            fit = [b for b in free if item not in bins[b]]
            if not fit:  # all that have room have it: one of them takes something in its place
                fit = [_make_room(item, bins, sums, share, free)]
            into = min(fit, key=lambda b: (sums[b], b))
            bins[into].append(item)
            sums[into] += share[item]
    for _ in range(MOST_EXCHANGES):
        if not _exchange(bins, share):
            break
    return tuple(tuple(sorted(own)) for own in bins)


def _make_room(
    item: int, bins: list[list[int]], sums: list[float], share: Sequence[float], free: list[int]
) -> int:
    """Move something from a full bin without `item` into a bin with room, and say which it was.
    There is something: the full one has at least as many, and no `item`."""
    full = min((b for b, own in enumerate(bins) if item not in own), key=lambda b: (sums[b], b))
    target = min(free, key=lambda b: (sums[b], b))
    moved = min((i for i in bins[full] if i not in bins[target]), key=lambda i: (share[i], i))
    bins[full].remove(moved)
    bins[target].append(moved)
    sums[full] -= share[moved]
    sums[target] += share[moved]
    return full


def _exchange(bins: list[list[int]], share: Sequence[float]) -> bool:
    """Make the exchange with the heaviest bin that lowers its load most, not raising the other's
    above; False if there is none."""
    sums = [sum(share[i] for i in own) for own in bins]
    top = max(range(len(bins)), key=lambda b: (sums[b], -b))
    best, chosen = sums[top] * (1 - 1e-12), None
    for other, own in enumerate(bins):
        for mine in bins[top]:
            if other == top or mine in own:
                continue
            for theirs in own:
                less = share[mine] - share[theirs]
                after = max(sums[top] - less, sums[other] + less)
                if after < best and theirs not in bins[top]:
                    best, chosen = after, (other, mine, theirs)
    if chosen is None:
        return False
    other, mine, theirs = chosen
    bins[top][bins[top].index(mine)] = theirs
    bins[other][bins[other].index(theirs)] = mine
    return True


def rank_loads(loads: Loads, placement: Placement) -> list[float]:
    """The load of each rank, where every expert's is spread evenly over its copies."""
    op, values = "rank_loads", _values(loads, "rank_loads")
    expect(len(values) == placement.num_experts, op, "loads", f"{placement.num_experts}",
           len(values))  # fmt: skip
    share = [load / len(slots) for load, slots in zip(values, placement.expert_slots, strict=True)]
    return [sum(share[e] for e in own) for own in placement.ranks]


def heaviest(loads: Loads, placement: Placement) -> float:
    """The largest of `rank_loads`: what a layer waits for."""
    return max(rank_loads(loads, placement))


def _near(found: Placement, current: Placement, nodes: Sequence[Sequence[int]]) -> Placement:
    """The same sets of experts, on ranks and in slots that have as many of them already: nodes
    (lists of ranks) change places first, then the ranks of a node."""
    kept = [[len({*new} & {*old}) for old in current.ranks] for new in found.ranks]
    sizes = found.counts

    def alike(a: Sequence[int], b: Sequence[int]) -> bool:
        return [sizes[i] for i in a] == [sizes[i] for i in b]

    of_nodes = [
        [sum(kept[i][j] for i in new for j in old) if alike(new, old) else -1 for old in nodes]
        for new in nodes
    ]
    result: list[tuple[int, ...]] = [()] * found.num_ranks
    for new_node, old_node in enumerate(_matched(of_nodes)):
        mine, theirs = nodes[new_node], nodes[old_node]
        gains = [[kept[i][j] if sizes[i] == sizes[j] else -1 for j in theirs] for i in mine]
        for place, target in enumerate(_matched(gains)):
            here = theirs[target]
            result[here] = _in_slots(found.ranks[mine[place]], current.ranks[here])
    return Placement(found.num_experts, tuple(result))


def _matched(gains: Sequence[Sequence[int]]) -> list[int]:
    """For each row a column of its own, the largest gains first; -1 marks what must not be."""
    order = sorted(
        (-gain, row, column)
        for row, line in enumerate(gains)
        for column, gain in enumerate(line)
        if gain >= 0
    )
    result, taken = [-1] * len(gains), set()
    for _, row, column in order:
        if result[row] < 0 and column not in taken:
            result[row] = column
            taken.add(column)
    return result


def _in_slots(experts: Sequence[int], current: Sequence[int]) -> tuple[int, ...]:
    """`experts` in the order in which those that stay keep their slots."""
    arriving = iter(sorted({*experts} - {*current}))
    return tuple(e if e in experts else next(arriving) for e in current)


def _values(loads: Loads, op: str) -> list[float]:
    if isinstance(loads, ExpertLoad):
        loads = loads.counts
    if isinstance(loads, Tensor):
        expect(loads.ndim == 1, op, "loads", "of shape (E,)", tuple(loads.shape))
        loads = loads.detach().cpu().double().tolist()
    expect_type(loads, Sequence, op, "loads")
    values = [float(load) for load in loads]
    expect(len(values) >= 1, op, "loads", "of at least one expert", "none")
    for expert, load in enumerate(values):
        fits = 0 <= load < float("inf")
        expect(fits, op, f"loads[{expert}]", "finite and at least 0", load)
    return values


def _expect_sizes(op: str, num_experts: int, ranks: int, redundant: int) -> None:
    expect_type(ranks, int, op, "ranks")
    expect_type(redundant, int, op, "redundant")
    fits = 1 <= ranks <= num_experts
    expect(fits, op, "ranks", f"1 to {num_experts}, the number of experts", ranks)
    most = num_experts - -(-num_experts // ranks)
    wanted = f"0 to {most}: {num_experts} experts over {ranks} ranks, none twice on one"
    expect(0 <= redundant <= most, op, "redundant", wanted, redundant)


def _expect_current(current: Placement, room: Sequence[int], num_experts: int, op: str) -> None:
    expect_type(current, Placement, op, "current")
    expect(current.num_experts == num_experts, op, "current", f"of {num_experts} experts", current)
    counts = [*current.counts]
    expect(counts == [*room], op, "current", f"of {[*room]} slots per rank", counts)
