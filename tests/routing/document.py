"""Write docs/routing-families.md: python -m tests.routing.document

Recipes and formulas come from what `Routing.from_transformers` returns for the configs in
`cases.py`, dtypes from the cases, so the page can't say anything else than the code.
"""

from __future__ import annotations

from dataclasses import fields

import transformers

from tests.routing.case import ROOT, Case
from tests.routing.cases import CASES
from tmoe.routing import Routing, RoutingMethod, RoutingRule
from tmoe.routing.families import FAMILIES, REFUSED
from tmoe.routing.rule import TINY

PAGE = ROOT / "docs" / "routing-families.md"

# Of a config, what decides about the formula. The rest are numbers in it, and have symbols here.
DECIDING = (
    "norm_topk_prob", "moe_renormalize", "topk_method", "expert_selection_fn", "use_expert_bias",
    "scoring_func", "moe_normalize_expert_weights", "num_experts_per_tok",
    "moe_router_logit_softcapping",
)  # fmt: skip
SYMBOLS = {"logit_scale": "a", "logit_softcap": "z", "jitter": "j", "num_shared": "S"}

INTRO = """\
# Routing: the families of transformers

`Routing.from_transformers(config)` reads a model's routing from its config. This page has the
recipe of every family, as transformers {version} computes it. `python -m tests.routing.document`
writes it from the code; `tests/routing/test_families.py` compares each row with the family's own
router module.

| symbol | meaning |
| --- | --- |
| x | an expert's logit |
| s | an expert's score |
| v | a selected expert's weight before it is divided or scaled; Σ adds up the selected |
| b | selection bias, learned: `route(..., bias=...)` |
| e | scale of an expert, learned: `route(..., expert_scale=...)` |
| c | scaling factor, from the config |
| a, z, j, S | also from the config: logit multiplier, soft cap, jitter, number of shared experts |
| TINY | 2⁻¹⁴⁹, `tmoe.routing.rule.TINY` |

σ is the sigmoid. Operations are done in the order in which they stand. Of equal choices the lower
index wins; transformers leaves ties open.

**Precision.** The columns *logits*, *scores* and *weights* are the dtypes that transformers has in
a bf16 model; *model* means bf16. We compute scores and weights in fp32, whatever the logits' dtype.
Where the scores are fp32 in transformers too, the same logits give the same experts. Scores in bf16
tie, or change places, when they differ by less than their rounding; there our experts are those of
fp32. Where the logits are fp32, the product of hidden states and router matrix is one of fp32.

**Sums of zeros.** Families without an epsilon divide 0 by 0 when all selected scores are 0, and
make NaN of it. We divide by TINY or more, so that the weights are 0.

**What isn't in a routing:** factors on the sum over the experts, which the block has; shared
experts that the router doesn't weigh; and what the column *besides* says.

"""


def formula(rule: RoutingRule) -> tuple[str, str]:
    """(what the K largest are selected by, the weight)."""
    score = {"logit": "x", "softmax": "softmax(x)", "sigmoid": "σ(x)"}
    s = (score | {"sqrtsoftplus": "√softplus(x)"})[rule.score]
    s = s.replace("x)", "a·x)") if rule.logit_scale != 1 else s
    s = s.replace("x)", "z·tanh(x/z))") if rule.logit_softcap else s
    choice = f"s = {s}" if s != "x" else "x"
    if rule.takes_bias:
        choice = f"{choice}, by s + b" if s != "x" else "x + b"
    if rule.group_score:
        of = "two best" if rule.group_score == "top2" else "best"
        choice += f"; in the `topk_group` groups whose {of} are largest"
        choice += ", other experts compete with 0" if rule.ruled_out == "zero" else ""
    v = {
        "score": "s" if s != "x" else "x",
        "sigmoid": "σ(x)",
        "softmax": "softmax of the K x",
        "sparsemixer": "1 / Σ exp(xₙ − x), over the n still left with (x − xₙ) / max(|xₙ|, x) ≤ 2j",
    }[rule.weight]
    weight = v
    if rule.renormalize:
        total = "Σ v" + (f" + {rule.epsilon:g}" if rule.epsilon else "")
        if rule.min_sum:
            total = f"max({total}, {minimum(rule.min_sum)})"
        weight = f"v = {v}; v / ({total})" if rule.epsilon else f"v = {v}; v / {total}"
        weight += ", Σ and weights with S shared experts" if rule.num_shared else ""
    if rule.takes_scaling_factor:
        weight += "; × c"
    if rule.takes_expert_scale:
        weight += "; × e"
    if rule.weight_on_input:
        weight += "; on the expert's input"
    return choice, weight


def recipe(routing: Routing) -> str:
    """The method's name, or the rule with what differs from the default."""
    if isinstance(routing.method, RoutingMethod):
        return f'`"{routing.method.name}"`'
    words = []
    for name, default in ((item.name, item.default) for item in fields(RoutingRule)):
        value = getattr(routing.method, name)
        if value != default:
            word = f'"{value}"' if isinstance(value, str) else f"{value}"
            word = minimum(value) if name == "min_sum" else word
            words.append(f"{name}={SYMBOLS.get(name, word)}")
    return f"`RoutingRule({', '.join(words)})`"


def minimum(min_sum: float) -> str:
    """A smallest sum that isn't ours is Ernie's."""
    return "TINY" if min_sum == TINY else "moe_norm_min"


def deciding(changes: dict[str, object]) -> str:
    changes = changes | changes.get("ffn_config", {})
    words = [f"{name}={changes[name]!r}" for name in DECIDING if name in changes]
    if changes.get("n_group", 0) is None:
        words.append("n_group=None")
    if "topk_method" in changes and changes["routed_scaling_factor"] == 1:
        words.append("routed_scaling_factor=1")
    return ", ".join(f"`{word}`" for word in words)


def table(head: str, rows: list[tuple[str, ...]]) -> list[str]:
    width = len(rows[0])
    lines = ["| " + " | ".join(cells).replace("|xₙ|", "\\|xₙ\\|") + " |" for cells in rows]
    return [head, "| " + " | ".join(["---"] * width) + " |", *lines, ""]


def section(router: str, line: str, cases: list[Case]) -> list[str]:
    """A router: its recipes, and the families that have it."""
    recipes = {}
    for case in cases:
        for changes in case.configs:
            routing = Routing.from_transformers(case.config(changes))
            row = (recipe(routing), *formula(routing.rule))
            recipes.setdefault(row, deciding(changes))
    rows = [(when, *row) for row, when in recipes.items()]
    families = [
        (f"`{case.model_type}`", *case.dtypes, f"`{case.source}`", case.note) for case in cases
    ]
    return [
        f"## `{router}`",
        "",
        line,
        "",
        *table("| config | method | selects the K largest | weight |", rows),
        *table("| model type | logits | scores | weights | source | besides |", families),
    ]


def page() -> str:
    lines = INTRO.format(version=transformers.__version__).splitlines()
    by_type = {case.model_type: case for case in CASES}
    for router, names in FAMILIES.items():
        line = router.__doc__.strip().splitlines()[0]
        lines += section(router.__name__, line, [by_type[name] for name in names])
    lines += [
        "## Refused",
        "",
        "`ValueError`, as for a model without experts.",
        "",
    ]
    lines += table("| model type | why |", [(f"`{name}`", why) for name, why in REFUSED.items()])
    return "\n".join(line.rstrip() for line in lines).rstrip() + "\n"


def main() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
