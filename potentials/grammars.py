"""Constraints by llguidance: regular expressions, JSON Schemas, context-free grammars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smcsample.potentials.constraint import Constraint, Ends, check_ends, shown_ends
from smcsample.potentials.grammar_state import GrammarLanguage, check_grammar, llguidance
from smcsample.potentials.json_schema import schema_grammar, schema_text

if TYPE_CHECKING:
    from smcsample.lm.stream import Model

Limits = Mapping[str, int] | tuple[tuple[str, int], ...]


def _checked(constraint: Regex | JsonSchema | Grammar) -> None:
    """Refuse what can't be compiled, and keep `limits` as something that compares."""
    object.__setattr__(constraint, "limits", tuple(sorted(dict(constraint.limits).items())))
    check_ends(constraint.ends)
    check_grammar(constraint.grammar, repr(constraint))


def _language(constraint: Regex | JsonSchema | Grammar, model: Model) -> GrammarLanguage:
    return GrammarLanguage(constraint.grammar, repr(constraint), model, dict(constraint.limits))


@dataclass(frozen=True, repr=False)
class Regex(Constraint):
    r"""The whole continuation matches a regular expression, in any tokenisation.

    The syntax is that of Rust's regex crate: Unicode classes (`\d`, `\w`, `\p{L}`), flags (`(?i)`), no look-around, no
    `\b`, no back-references. The text begins where the prompt ends, its leading space included: after "The answer is"
    most models want `r" \d+"`.

    Args:
        pattern: the expression.
        ends: "constraint" or "model", see `smcsample.potentials.constraint`.
        limits: keyword arguments of `llguidance.LLParserLimits`.

    Raises:
        ImportError: llguidance is not installed.
        TypeError: pattern is no string.
        ValueError: a pattern that does not compile, or (when a run starts) that no text matches.
    """

    pattern: str
    ends: Ends = "constraint"
    limits: Limits = ()

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, str):
            raise TypeError(f"pattern is a {type(self.pattern).__name__}; give a string")
        _checked(self)

    def language(self, model: Model) -> GrammarLanguage:
        return _language(self, model)

    @property
    def grammar(self) -> str:
        return f"start: /{llguidance().regex_to_lark(self.pattern, use_ascii='')}/"

    def __repr__(self) -> str:
        return f"Regex({self.pattern!r}{shown_ends(self.ends)})"


@dataclass(frozen=True, repr=False)
class JsonSchema(Constraint):
    """The whole continuation is a JSON document of a schema.

    Keys come in the order of the schema, without duplicates; integers are digits only. There is no whitespace but what
    `whitespace` allows between tokens: unbounded whitespace, which JSON permits, lets a model fill its budget with it.

    Args:
        schema: a dict, JSON text, True, or a pydantic model class; kept as JSON text.
        ends: "constraint" or "model", see `smcsample.potentials.constraint`. A closing brace closes a document, so by
            default nothing is paid for its end; a number at the top level goes on until the model's EOS.
        whitespace: a regular expression for what may stand around `:`, `,` and brackets; "" for nothing.
        limits: keyword arguments of `llguidance.LLParserLimits`.

    Raises:
        ImportError: llguidance is not installed.
        TypeError: a schema of another kind.
        ValueError: no JSON; a keyword that would not be enforced, by name; a schema that no document satisfies.
    """

    schema: str
    ends: Ends = "constraint"
    whitespace: str = "[ ]?"
    limits: Limits = ()

    def __init__(
        self,
        schema: object,
        ends: Ends = "constraint",
        whitespace: str = "[ ]?",
        limits: Limits = (),
    ) -> None:
        for name, value in (
            ("schema", schema_text(schema)),
            ("ends", ends),
            ("whitespace", whitespace),
            ("limits", limits),
        ):
            object.__setattr__(self, name, value)
        _checked(self)

    def language(self, model: Model) -> GrammarLanguage:
        return _language(self, model)

    @property
    def grammar(self) -> str:
        return schema_grammar(self.schema, self.whitespace)

    def __repr__(self) -> str:
        shown = self.schema if len(self.schema) <= 60 else self.schema[:57] + "…"
        return f"JsonSchema({shown}{shown_ends(self.ends)})"


@dataclass(frozen=True, repr=False)
class Grammar(Constraint):
    """The whole continuation is a sentence of a context-free grammar, in llguidance's dialect of Lark.

    Terminals (upper case) are matched greedily: `start: A "ab"` with `A: /[a-z]*/` never gets to its "ab", and its
    particles end at the length cap with weight zero. Write the same language as one terminal, or with rules (lower
    case).

    Args:
        lark: the grammar; its start rule is `start`.
        ends: "constraint" or "model", see `smcsample.potentials.constraint`.
        limits: keyword arguments of `llguidance.LLParserLimits`.

    Raises:
        ImportError: llguidance is not installed.
        TypeError: lark is no string.
        ValueError: a grammar that does not compile, or sets `%llguidance` options, or (when a run starts) is empty.
    """

    lark: str
    ends: Ends = "constraint"
    limits: Limits = ()

    def __post_init__(self) -> None:
        if not isinstance(self.lark, str):
            raise TypeError(f"lark is a {type(self.lark).__name__}; give a grammar as a string")
        if "%llguidance" in self.lark:
            raise ValueError(
                "lark has a line of %llguidance options; leave it out: forced tokens would falsify weights"
            )
        _checked(self)

    def language(self, model: Model) -> GrammarLanguage:
        return _language(self, model)

    @property
    def grammar(self) -> str:
        return self.lark

    def __repr__(self) -> str:
        shown = self.lark if len(self.lark) <= 60 else self.lark[:57] + "…"
        return f"Grammar({shown!r}{shown_ends(self.ends)})"
