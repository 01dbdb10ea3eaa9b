"""Samples of SmolLM2 under constraints, each checked by another implementation: `re`, `jsonschema`, `lark`."""

from __future__ import annotations

import json
import re

import pytest

import smcsample as smc
from smcsample.demo import demo_target as lm
from smcsample.potentials import LM, Bias, Choice, Grammar, JsonSchema, Regex, StopAt
from smcsample.proposals import Draft
from tiny_models import tiny

pytestmark = [pytest.mark.model, pytest.mark.slow]

REGEXES = {
    r" (Paris|London|Lyon city)": "The capital of France is",
    r"[0-9]{4}-(0[1-9]|1[0-2])-[0-3][0-9]": "The date today is ",
    r" ?[+-]?[0-9]+(\.[0-9]{1,3})?": "The temperature outside is",
    r"[αβγ€😀é]{2,4}": "Some symbols: ",
    r" [A-Z][a-zà-ÿ]{2,8}( [a-z]{2,8}){2,4}\.": "Her name is",
    r"(?i) (yes|no|maybe)": "Is water wet? Answer:",
    r"[\p{L}]{3,6}\n[^\n]{3,10}!": "A poem:\n",
}
TREE = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
BITS = {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"enum": ["red", "green", 3, None, True]}, "minItems": 1, "maxItems": 4},
    {"type": "number", "exclusiveMinimum": -2, "maximum": 7.5},
    {"type": "array", "items": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 9}, "maxItems": 3},
    {"type": "string", "pattern": "^[a-z]{2,5}é$"},
    {"const": {"ü": ["€", {"x": 1.5}]}},
    {"$defs": {"tree": TREE}, "$ref": "#/$defs/tree"},
    {
        "type": "object",
        "properties": {
            "a": {"type": "object", "properties": {"b": BITS}, "required": ["b"], "additionalProperties": False}
        },
        "required": ["a"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "patternProperties": {"^k[0-9]$": {"type": "integer", "maximum": 9, "minimum": 0}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
    },
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "boolean"}]},
]
GRAMMARS = {
    'start: sum\nsum: item (("+" | "-") item)*\nitem: NUMBER | "(" sum ")"\nNUMBER: /[0-9]{1,2}/': "2+3 = ",
    'start: "<" NAME ">" body "</>"\nbody: start | WORD\nNAME: /[a-z]{1,3}/\nWORD: /[A-Z]{1,4}/': "XML: ",
    'start: list\nlist: "[" (value ("," value)*)? "]"\nvalue: list | "0" | "1"': "A nested list: ",
}


def sample(constraint: object, prompt: str, seed: int, cap: int = 32) -> list[str]:
    """The texts of positive weight."""
    posterior = smc.sample(prompt, LM(lm()) * constraint, n_particles=2, block_size=7, max_new_tokens=cap, seed=seed)
    if posterior.status is smc.Status.DEAD:
        return []
    return [text for text, weight in zip(posterior.texts, posterior.weights.tolist(), strict=True) if weight > 0]


@pytest.mark.parametrize("pattern", REGEXES)
def test_regexes(pattern: str) -> None:
    texts = sample(Regex(pattern), REGEXES[pattern], seed=1)
    texts += sample(Regex(pattern, ends="model"), REGEXES[pattern], seed=2) if "A-Z" in pattern else []
    assert texts
    for text in texts:
        assert re.fullmatch(pattern.replace(r"\p{L}", r"^\W\d_"), text), text


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_schemas(schema: dict) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    target = JsonSchema(schema) * Bias({"null": 4.0})  # a recursion has to end within the cap
    texts = sample(target, "A JSON document:\n", seed=1, cap=40)
    assert texts, "every particle met the cap"
    for text in texts:
        checker = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        checker.validate(json.loads(text))


def test_pydantic_model() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Point(pydantic.BaseModel):
        """A point."""

        x: int = pydantic.Field(ge=0, le=9, description="across")
        label: str | None = pydantic.Field(default=None, max_length=5)

    for text in sample(JsonSchema(Point), "A JSON document:\n", seed=3):
        Point.model_validate_json(text)


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_grammars(grammar: str) -> None:
    lark = pytest.importorskip("lark")
    parser = lark.Lark(grammar, parser="earley")
    texts = [text for seed in (1, 2) for text in sample(Grammar(grammar), GRAMMARS[grammar], seed, cap=16)]
    assert texts
    for text in texts:
        parser.parse(text)


def test_greedy_lexer() -> None:
    """A terminal that runs past the only way out: particles end at the cap with weight zero, and none is returned."""
    grammar = Grammar('start: A "ab"\nA: /[a-z]*/')
    posterior = smc.sample("x", LM(lm()) * grammar, n_particles=4, max_new_tokens=6)
    assert posterior.status is smc.Status.DEAD
    assert posterior.log_evidence == float("-inf")
    with pytest.raises(smc.DeadPopulationError):
        posterior.draw()


def test_no_continuation_within_the_cap() -> None:
    posterior = smc.sample("x", LM(lm()) * Regex("[a-z]{200}"), n_particles=4, max_new_tokens=5)
    assert posterior.status is smc.Status.DEAD
    assert not posterior.log_weights.isnan().any()


def test_power_and_draft_and_stops_together() -> None:
    target = LM(lm()) ** 2 * Regex(r" [a-z ]{5,60}[.,]?") * StopAt([".", ","])
    posterior = smc.sample("Once upon a time there was", target, Draft(lm()), n_particles=4, max_new_tokens=24, seed=2)
    for text, reason, w in zip(posterior.texts, posterior.finish_reasons, posterior.weights.tolist(), strict=True):
        assert w == 0 or re.fullmatch(r" [a-z ]{5,60}[.,]?", text)
        assert w == 0 or (reason == "stop") == (text[-1] in ".,")


def test_choice_on_a_real_model() -> None:
    posterior = smc.sample("Is water wet? Answer:", LM(lm()) * Choice([" yes", " no", " not"]), n_particles=8)
    assert set(posterior.texts) <= {" yes", " no", " not"}


def test_a_tokenizer_that_is_no_text_is_refused() -> None:
    for constraint in (Regex("a"), Choice(["a"])):
        with pytest.raises(ValueError, match=r"can't (read|be read)|can't be read as"):
            smc.sample([3], LM(tiny()) * constraint, max_new_tokens=4)
