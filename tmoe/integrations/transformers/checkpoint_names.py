"""Where the tensors of a checkpoint go in a model: by transformers' own rules for its names.

Checkpoints name tensors as their authors did; transformers renames, stacks and splits on the way
in. `Destinations` asks the same rules, so there is no table of families here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from tmoe.checkpoints import Checkpoint
from tmoe.checkpoints.json_files import some
from tmoe.checkpoints.stored import quantized_layers
from tmoe.checks import expect

_OF_ONE_EXPERT = re.compile(r"(.*)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight$")
_ROLES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}  # the rest: down
# Scales of a quantised cache of keys and values, which transformers' cache has no use for.
_OF_CACHE = re.compile(
    r"\.(?:[kv]_scale|kv_scale|kv_cache_scaling_factor|[kv]_proj\.output_scale)$"
)


@dataclass
class ExpertSources:
    """The layers of a checkpoint that hold the experts of one module, by role and number."""

    layers: dict[str, dict[int, str]] = field(default_factory=dict)
    transposed: bool | None = None  # of fused tensors, where transformers has a rule for it

    def add(self, role: str, expert: int, layer: str) -> None:
        self.layers.setdefault(role, {})[expert] = layer

    def names(
        self, module: str, num_first: int, num_experts: int, op: str
    ) -> tuple[tuple[str, ...], str]:
        """Names for `StoredExperts.find`: of the first projection, and of the second.

        `num_first`: experts that the module's first weight has rows for. LongCat-Flash's has more
        than the second: those do nothing, and aren't read.
        """
        roles = set(self.layers)
        wanted = "gate, up and down_proj of all experts, or fused tensors of both"
        ok = roles in ({"gate", "up", "down"}, {"up", "down"}, {"fused_first", "fused_down"})
        expect(ok, op, module, wanted, ", ".join(sorted(roles)))
        counts = {role: num_first if role in ("gate", "up") else num_experts for role in roles}
        names = {
            role: self._name(role, module, num_experts, count, op) for role, count in counts.items()
        }
        first = ("fused_first",) if "fused_first" in roles else ("gate", "up")
        down = "fused_down" if "fused_first" in roles else "down"
        return tuple(names[role] for role in first if role in names), names[down]

    def _name(self, role: str, module: str, num_experts: int, at_most: int, op: str) -> str:
        layers = self.layers[role]
        if role.startswith("fused"):
            return layers[0]
        absent = [e for e in range(num_experts) if e not in layers]
        what = f"{module}: {role}_proj"
        expect(not absent, op, what, f"of experts 0 to {num_experts - 1}", f"none of {absent[:8]}")
        more = sorted(set(layers) - set(range(at_most)))
        expect(not more, op, what, f"of {num_experts} experts, as the config says", f"{more[:8]}")
        head, _, last = layers[0].rpartition(".0.")
        name = f"{head}.{{e}}.{last}"
        others = [layer for e, layer in layers.items() if layer != name.format(e=e)]
        expect(not others, op, what, f"named {name} throughout", some(others))
        return name


class Destinations:
    """What becomes of every tensor of `checkpoint` in `model`.

    Attributes:
        experts: for each of the experts' modules whose weights are quantised, where they are.
        dense: other quantised layers: the name under which transformers takes their weight, and
            the tensors, by role.
        plain: the tensors that are loaded as they are.
    """

    def __init__(
        self, checkpoint: Checkpoint, model: Any, targets: dict[str, tuple[str, str]], op: str
    ) -> None:
        """`targets`: the parameters of experts' modules by name: the module's name, and "first" or
        "down". Raises ``ValueError`` for tensors that are missing or have no place."""
        self._op, self._model, self._targets = op, model, targets
        self._checkpoint = checkpoint
        mapping = get_model_conversion_mapping(model)
        self._mapping = mapping
        self._renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        self._converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._parameters = model.state_dict()
        self._modules = {module for module, _ in targets.values()}
        self.experts: dict[str, ExpertSources] = {}
        self.dense: dict[str, dict[str, str]] = {}
        self.filled: set[str] = set()  # the model's tensors that come from `dense` and `plain`
        self._quantized = quantized = quantized_layers(checkpoint)
        of_layers = {name for names in quantized.values() for name in names.values()}
        self.plain = [name for name in checkpoint if name not in of_layers]
        sources = {self._weight(layer, names): layer for layer, names in quantized.items()}
        homeless: list[str] = []
        for name in sorted((*sources, *self.plain), key=dot_natural_key):
            target, converted = self._target(name)
            layer = sources.get(name)
            if layer is not None and self._is_of_experts(name, layer, target):
                continue
            if target not in self._parameters:
                homeless.append(name if layer is None else quantized[layer]["data"])
                continue
            if layer is not None:
                stacked = self._parameters[target].ndim > 2
                wanted = "in a module of experts that tmoe runs, or an ordinary layer"
                expect(not stacked, op, quantized[layer]["data"], wanted, f"for {target}")
                self.dense[name] = quantized[layer]
            self.filled |= {target, *converted}
        self._check(homeless)

    @property
    def conversions(self) -> list[Any]:
        """The rules that this checkpoint needed. transformers reverses them when it saves."""
        return [rule for rule in self._mapping if rule.was_used()]

    def target(self, name: str) -> str | None:
        """The parameter that a tensor becomes alone, unchanged; None if it is one of several."""
        target, converted = self._target(name)
        return None if converted else target

    def destination(self, name: str) -> str:
        """The parameter that a tensor becomes, alone or as one of several."""
        return self._target(name)[0]

    def steps(self, name: str) -> list[Any]:
        """What transformers does to a tensor on the way in."""
        rule = self._rule(name)
        return [] if rule is None else rule.operations

    @staticmethod
    def _weight(layer: str, names: dict[str, str]) -> str:
        """The name that the layer's weight would have if it weren't quantised."""
        return f"{layer}.weight" if names["data"].startswith(f"{layer}.") else layer

    def _target(self, name: str) -> tuple[str, list[str]]:
        """The name in the model, and those of everything that a conversion makes along with it."""
        prefix = self._model.base_model_prefix
        target, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._parameters
        )
        if target not in self._parameters and name in self._parameters:
            return name, []
        if pattern is None:
            return target, []
        rule = next(r for r in self._converters if pattern in r.source_patterns)
        patterns = rule.target_patterns
        return target, [target.replace(patterns[0], other) for other in patterns]

    def _is_of_experts(self, name: str, layer: str, target: str) -> bool:
        """Note a quantised layer that holds experts' weights."""
        if target in self._targets and not name.endswith(".weight"):
            module, role = self._targets[target]
            sources = self.experts.setdefault(module, ExpertSources())
            sources.add(f"fused_{role}", 0, layer)
            self._expect_known_steps(name, ("Transpose",))
            for step in self.steps(name):
                data = self._checkpoint.info(self._quantized[layer]["data"])
                as_it_is = step.check_dims and data.shape[1] == self._parameters[target].shape[1]
                sources.transposed = not as_it_is
            return True
        renamed, _ = rename_source_key(
            name, self._renamings, [], self._model.base_model_prefix, self._parameters
        )
        if (match := _OF_ONE_EXPERT.match(renamed)) is None:
            return False
        for module in self._with_prefix(match[1]):
            if module in self._modules:
                self._expect_known_steps(name, ("MergeModulelist", "Concatenate"))
                role = _ROLES.get(match[3], "down")
                self.experts.setdefault(module, ExpertSources()).add(role, int(match[2]), layer)
                return True
        return False

    def _rule(self, name: str) -> Any:
        """The conversion that transformers would put the tensor through, or None."""
        prefix = self._model.base_model_prefix
        _, pattern = rename_source_key(
            name, self._renamings, self._converters, prefix, self._parameters
        )
        return next((r for r in self._converters if pattern in r.source_patterns), None)

    def _expect_known_steps(self, name: str, known: tuple[str, ...]) -> None:
        """What transformers does to the weights on the way in has to be what tmoe does too."""
        steps = [type(step).__name__ for step in self.steps(name)]
        others = [step for step in steps if step not in known]
        wanted = f"of experts that transformers loads with {' and '.join(known)} alone"
        expect(not others, self._op, name, wanted, ", ".join(steps))

    def _with_prefix(self, module: str) -> Iterable[str]:
        prefix = f"{self._model.base_model_prefix}."
        return module, prefix + module, module.removeprefix(prefix)

    def _check(self, homeless: list[str]) -> None:
        unexpected = _patterns(self._model._keys_to_ignore_on_load_unexpected)
        surplus = [
            name for name in homeless
            if not unexpected(name) and not unexpected(self._target(name)[0])
            and not _OF_CACHE.search(name) and not name.endswith("rotary_emb.inv_freq")
        ]  # fmt: skip
        where = "the checkpoint"
        wanted = "without tensors that the model has no place for"
        expect(not surplus, self._op, where, wanted, f"{len(surplus)}: {some(surplus)}")
        ignored = _patterns(self._model._keys_to_ignore_on_load_missing)
        tied = getattr(self._model, "all_tied_weights_keys", None) or {}
        held = {name for name, (module, _) in self._targets.items() if module in self.experts}
        missing = [
            name for name in self._parameters
            if name not in self.filled and name not in held and name not in tied
            and not ignored(name)
        ]  # fmt: skip
        got = f"without {len(missing)} tensors: {some(missing)}"
        expect(not missing, self._op, where, "complete", got)


def _patterns(patterns: Iterable[str] | None) -> Any:
    found = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None
    return lambda name: found is not None and found.search(name) is not None
