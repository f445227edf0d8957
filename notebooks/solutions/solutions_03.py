"""Solutions of notebook 3."""


def best_experts(scores, k):
    # Python's sort keeps the order of equals, so the lower index stays in front.
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


def biased_weights(scores, bias, k):
    choices = [s + b for s, b in zip(scores, bias, strict=True)]
    chosen = best_experts(choices, k)
    total = sum(scores[e] for e in chosen)
    return [scores[e] / total for e in chosen]


def kept_groups(choices, n_group, topk_group):
    size = len(choices) // n_group
    scores = [sum(sorted(choices[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
    return sorted(best_experts(scores, topk_group))
