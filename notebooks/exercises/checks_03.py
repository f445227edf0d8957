"""Checks of notebook 3."""

from __future__ import annotations

from .judging import ask, compare


def best_experts(answer):
    for scores, k in (([0.1, 0.7, 0.7, 0.2], 3), ([0.5] * 5, 2), ([-1.0, -3.0, -2.0], 2)):
        experts = range(len(scores))
        wanted = sorted(experts, key=lambda e: -scores[e])[:k]
        mistakes = {
            "Of equal scores the lower index comes first.": sorted(
                experts, key=lambda e: (-scores[e], -e)
            )[:k],
            "Return the experts, not their scores.": sorted(scores, reverse=True)[:k],
            "They should be in the order of their scores, the largest first.": sorted(wanted),
        }
        compare(ask(answer, scores, k), wanted, f"{scores}, k={k}", mistakes)


def biased_weights(answer):
    cases = (([0.8, 0.6, 0.4], [-0.5, 0.0, 0.1], 2), ([0.9, 0.5, 0.2, 0.3], [0, 0, 0.6, 0], 2))
    for scores, bias, k in cases:
        choices = [s + b for s, b in zip(scores, bias, strict=True)]
        ids = sorted(range(len(scores)), key=lambda e: -choices[e])[:k]
        without = sorted(range(len(scores)), key=lambda e: -scores[e])[:k]
        mistakes = {
            "The bias must not enter the weights; weigh by the score.": _shares(choices, ids),
            "The bias decides who is chosen; you chose by the score alone.": _shares(
                scores, without
            ),
            "Divide by the sum over the chosen experts.": [scores[e] for e in ids],
        }
        wanted = _shares(scores, ids)
        compare(ask(answer, scores, bias, k), wanted, f"{scores}, bias {bias}, k={k}", mistakes)


def _shares(values: list[float], ids: list[int]) -> list[float]:
    return [values[e] / sum(values[i] for i in ids) for e in ids]


def kept_groups(answer):
    cases = (
        ([0.9, 0.1, 0.6, 0.5, 0.3, 0.8, 0.2, 0.2], 4, 2),
        ([0.5, 0.5, 0.1, 0.5, 0.5, 0.2], 2, 1),
        ([0.4, 0.4, 0.4, 0.4], 2, 1),
    )
    for choices, n_group, topk_group in cases:
        size = len(choices) // n_group
        groups = [choices[g * size : (g + 1) * size] for g in range(n_group)]

        def kept(score, groups=groups, count=topk_group):
            order = sorted(range(len(groups)), key=lambda i: (-score(groups[i]), i))
            return sorted(order[:count])

        wanted = kept(lambda group: sum(sorted(group)[-2:]))
        mistakes = {
            "A group's score is the sum of its two best, not its best alone.": kept(max),
            "Only the two best of a group count, not all of them.": kept(sum),
            "Of equal groups the lower one wins.": sorted(
                sorted(range(n_group), key=lambda g: (-sum(sorted(groups[g])[-2:]), -g))[
                    :topk_group
                ]
            ),
        }
        case = f"{choices}, {n_group} groups, {topk_group} kept"
        compare(ask(answer, choices, n_group, topk_group), wanted, case, mistakes)
