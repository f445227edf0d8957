"""Layout: what each dimension of a `DeviceMesh` divides, and which ranks that makes talk.

tp   the width I of every expert, and of shared experts
ep   the experts
dp   the tokens: ranks along it have tokens of their own; along all others they have the same

TP           tp="x"                       every rank: all experts, I/n of each, all tokens
EP           ep="x"                       E/n experts, all tokens; the sums are added up
TP + EP      tp="t", ep="e"               both
DP + EP      ep="x", dp="x"               E/n experts, tokens of its own; tokens are exchanged
DP + TP + EP ep=("d", "t"), dp="d"        experts over all ranks, tokens the same along t
             tp="t", ep="d", dp="d"       experts along d, their width along t
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks import expect, expect_type
from .groups import Group, group_of

OP = "parallelize"
Dims = str | Iterable[str] | None


@dataclass(frozen=True, eq=False)
class Layout:
    """The groups of one rank. Made by `of`; making new groups is a collective of the mesh's ranks.

    Attributes:
        tp, ep, dp: names of the mesh's dimensions.
        everyone: all ranks that hold a part of one layer and its tokens: those of ep and tp.
        width: the ranks among which each expert's width is divided (tp).
        experts: the ranks among which experts are divided (ep).
        owners: of those, the ones with tokens of their own (ep and dp).
        shares: of those, the ones with the same tokens (ep without dp).
        copies: all with the same tokens (tp, and ep without dp).
        owner_of: for each of everyone, whose tokens it has: a place among the owners.
        experts_at: where the ranks of `experts` are among everyone.
    """

    tp: tuple[str, ...]
    ep: tuple[str, ...]
    dp: tuple[str, ...]
    everyone: Group
    width: Group
    experts: Group
    owners: Group
    shares: Group
    copies: Group
    owner_of: tuple[int, ...]
    experts_at: tuple[int, ...]

    @staticmethod
    def sizes(mesh: DeviceMesh, tp: Dims, ep: Dims, dp: Dims) -> dict[str, int]:
        """How many ranks divide the width ("tp"), and the experts ("ep"). Sends nothing; raises
        as `of` does."""
        given, names = _checked(mesh, tp, ep, dp), tuple(mesh.mesh_dim_names or ())
        return {
            arg: _product(mesh, [names.index(name) for name in given[arg]]) for arg in ("tp", "ep")
        }

    @classmethod
    def of(cls, mesh: DeviceMesh, tp: Dims, ep: Dims, dp: Dims) -> Layout:
        """Raises ``ValueError`` before anything is sent: for a dimension that the mesh hasn't, one
        that is named twice, none at all, or a rank outside the mesh."""
        given, names = _checked(mesh, tp, ep, dp), tuple(mesh.mesh_dim_names or ())
        own = set(given["ep"]) & set(given["dp"])
        parts = {
            "everyone": {*given["ep"], *given["tp"]},
            "width": set(given["tp"]),
            "experts": set(given["ep"]),
            "owners": own,
            "shares": set(given["ep"]) - own,
            "copies": {*given["tp"], *given["ep"]} - own,
        }
        groups: dict[str, Any] = {
            part: _group(mesh, [n for n in names if n in dims]) for part, dims in parts.items()
        }
        everyone = groups["everyone"].ranks
        return cls(
            given["tp"],
            given["ep"],
            given["dp"],
            **groups,
            owner_of=_owners(mesh, [n for n in names if n in own], everyone),
            experts_at=tuple(everyone.index(rank) for rank in groups["experts"].ranks),
        )

    @property
    def words(self) -> dict[str, Any]:
        """What all ranks have to agree on."""
        return {"tp": self.width.size, "ep": self.experts.size, "dp": self.owners.size}

    def __str__(self) -> str:
        said = [f"{name} {size}" for name, size in self.words.items() if size > 1]
        return f"Layout({', '.join(said) or 'one rank'})"


def _checked(mesh: DeviceMesh, tp: Dims, ep: Dims, dp: Dims) -> dict[str, tuple[str, ...]]:
    """The names of the dimensions for each argument."""
    expect_type(mesh, DeviceMesh, OP, "mesh")
    names = tuple(mesh.mesh_dim_names or ())
    wanted = "one with names for its dimensions (mesh_dim_names=...)"
    expect(len(names) == mesh.ndim, OP, "mesh", wanted, f"{names or 'none'}")
    inside = mesh.get_coordinate() is not None
    here = f"rank {dist.get_rank()}, and the mesh has {mesh.mesh.flatten().tolist()}"
    expect(inside, OP, "mesh", "one that this rank belongs to", here)
    given = {arg: _names(arg, dims, names) for arg, dims in (("tp", tp), ("ep", ep), ("dp", dp))}
    expect(bool(given["tp"] or given["ep"]), OP, "tp, ep", "given, at least one", "None")
    for other in ("ep", "dp"):
        both = sorted(set(given["tp"]) & set(given[other]))
        why = {"ep": "experts", "dp": "tokens"}[other]
        wanted = f"other dimensions than {other}: along tp ranks have the same {why}"
        expect(not both, OP, "tp", wanted, both)
    return given


def _names(arg: str, dims: Dims, known: tuple[str, ...]) -> tuple[str, ...]:
    """Names of dimensions, in the mesh's order."""
    if dims is None:
        return ()
    names = (dims,) if isinstance(dims, str) else tuple(dims)
    for name in names:
        expect_type(name, str, OP, arg)
        expect(name in known, OP, arg, f"of the mesh's dimensions {', '.join(known)}", repr(name))
    in_order = tuple(name for name in known if name in names)
    expect(in_order == names, OP, arg, f"in the mesh's order, each once, {in_order}", names)
    return names


def _group(mesh: DeviceMesh, dims: list[str]) -> Group:
    """The ranks that differ from this one along `dims` alone, in the mesh's order."""
    if not dims:
        return Group(None, (dist.get_rank(),), 0, mesh.device_type)
    names = list(mesh.mesh_dim_names or ())
    if len(dims) == 1:
        return Group.of(mesh.get_group(dims[0]), mesh.device_type)
    inside = [names.index(name) for name in dims]
    outside = [i for i in range(mesh.ndim) if i not in inside]
    rows = mesh.mesh.permute(*outside, *inside).reshape(-1, _product(mesh, inside)).tolist()
    ranks = next(row for row in rows if dist.get_rank() in row)
    return Group.of(group_of(ranks, mesh.get_group(dims[0])), mesh.device_type)


def _owners(mesh: DeviceMesh, dims: list[str], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """For each rank its place along `dims` alone."""
    names = list(mesh.mesh_dim_names or ())
    found = []
    for rank in ranks:
        at = (mesh.mesh == rank).nonzero()[0].tolist()
        place = 0
        for name in dims:
            place = place * mesh.size(names.index(name)) + at[names.index(name)]
        found.append(place)
    return tuple(found)


def _product(mesh: DeviceMesh, dims: list[int]) -> int:
    size = 1
    for dim in dims:
        size *= mesh.size(dim)
    return size
