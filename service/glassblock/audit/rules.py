"""The rule table: every mistake this version looks for, in the order in which reports name them."""

from collections.abc import Mapping
from types import MappingProxyType

from glassblock.audit.config_rules import CONFIG_RULES
from glassblock.audit.epsilon_rules import EPSILON_RULES
from glassblock.audit.gate_rules import GATE_RULES
from glassblock.audit.rule import Rule
from glassblock.audit.structure_rules import CONTAINER_RULES, DUPLICATE_RULE, INDEX_RULES
from glassblock.audit.tensor_rules import MISSING_RULES, TENSOR_RULES

RULES: Mapping[str, Rule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            *CONTAINER_RULES,
            *INDEX_RULES,
            *CONFIG_RULES,
            *EPSILON_RULES,
            *TENSOR_RULES,
            DUPLICATE_RULE,
            *GATE_RULES,
            *MISSING_RULES,
        )
    }
)
"""The rules by name."""
