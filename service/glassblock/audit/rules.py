"""The rule table: every mistake this version looks for, in the order in which reports name them."""

from collections.abc import Mapping
from types import MappingProxyType

from glassblock.audit.comparison_rules import COMPARISON_RULES, with_comparisons
from glassblock.audit.config_rules import CONFIG_RULES
from glassblock.audit.epsilon_rules import EPSILON_RULES
from glassblock.audit.gate_rules import GATE_RULES
from glassblock.audit.mixture_rules import MIXTURE_RULES
from glassblock.audit.norm_rules import NORM_RULES
from glassblock.audit.quantisation_rules import QUANTISATION_RULES
from glassblock.audit.range_rules import NEURON_RULES, RANGE_RULES
from glassblock.audit.rotary_rules import ROTARY_RULES
from glassblock.audit.rule import Rule
from glassblock.audit.structure_rules import CONTAINER_RULES, DUPLICATE_RULE, INDEX_RULES
from glassblock.audit.tensor_rules import MISSING_RULES, TENSOR_RULES

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: with_comparisons(rule)
        for rule in (
            *CONTAINER_RULES,
            *INDEX_RULES,
            *CONFIG_RULES,
            *EPSILON_RULES,
            *TENSOR_RULES,
            DUPLICATE_RULE,
            *GATE_RULES,
            *NEURON_RULES,
            *MISSING_RULES,
            *NORM_RULES,
            *ROTARY_RULES,
            *MIXTURE_RULES,
            *QUANTISATION_RULES,
            *RANGE_RULES,
            *COMPARISON_RULES,
        )
    }
)
"""The rules by name."""
