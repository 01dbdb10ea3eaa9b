"""Masks against brute force over SmolLM2's 49,152 tokens, and the cases of area "constraints" that need no run."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache

import pytest
import torch
from torch import Tensor

import smcsample as smc
from smcsample.demo import demo_target as lm
from smcsample.lm.batch import Batch
from smcsample.lm.token_bytes import token_bytes
from smcsample.potentials import Ban, Bias, Choice, Constraint, Grammar, JsonSchema, Regex
from smcsample.potentials.grammar_state import tokenizer_of
from smcsample.potentials.language import Language, State, Tracker

pytestmark = pytest.mark.model


@cache
def pieces() -> tuple[bytes, ...]:
    return token_bytes(lm())


def batch(n: int, model: object = None) -> Batch:
    model = model or lm()
    return Batch([[5]], smc.Source(0, 1, n), torch.tensor(model.eos_ids), 1000, model=model)


def walk(language: Language, text: str) -> State:
    """The state after a text, byte by byte where it must be."""
    state = language.root()
    for token in lm().tokenizer(text, add_special_tokens=False)["input_ids"]:
        state = language.child(state, token)
    return state


def allowed(language: Language, text: str = "") -> set[bytes]:
    mask = language.mask([walk(language, text)])[0]
    return {pieces()[i] for i in mask.nonzero()[:, 0].tolist()}


def possible(constraint: Constraint, text: str) -> bool:
    """Whether the text is in the set, by tokens."""
    return walk(constraint.language(lm()), text).accepting


def test_token_bytes_are_those_of_the_tokenizer() -> None:
    theirs = tokenizer_of(lm(), "x")
    control = set(range(17))
    for i, piece in enumerate(pieces()):
        assert piece == (b"" if i in control else theirs.decode_bytes([i])), i
    assert b"".join(pieces()[i] for i in lm().tokenizer("naïve 😀\n\tx")["input_ids"]).decode() == "naïve 😀\n\tx"


def test_forced_bytes() -> None:
    """Every tokenisation of a forced text stays possible; the mask says of every token what the state says."""
    for constraint in (Regex("test"), Choice(["test"]), Grammar('start: "test"')):
        language = constraint.language(lm())
        assert allowed(language) == {b"t", b"te", b"tes", b"test"}
        root = language.root()
        mask = language.mask([root])[0]
        assert [language.step(root, i).alive for i in range(49152)] == mask.tolist()
    language = JsonSchema({"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}).language(
        lm()
    )
    assert allowed(language, '{"') == {b"n", b"na", b"nam", b"name"}


@pytest.mark.parametrize("pattern", ["[αβγ€😀é]{1,3}", "[0-9]{4}", "ab?", " ?foo", "(foo|foobar)baz?"])
def test_split_code_points(pattern: str) -> None:
    """Masks against all prefixes of all texts of the language, as bytes, for every token, at every state reached by
    random tokens; tokens that hold part of a character included."""
    letters = "αβγ€😀é" if "α" in pattern else "0123456789" if "0" in pattern else None
    if letters:
        sizes = (1, 2, 3) if "α" in pattern else (4,)
        texts = {"".join(t) for n in sizes for t in itertools.product(letters, repeat=n)}
    else:
        texts = {"ab?": {"a", "ab"}, " ?foo": {"foo", " foo"}}.get(
            pattern, {"fooba", "foobarba", "foobaz", "foobarbaz"}
        )
    assert all(re.fullmatch(pattern, text) for text in texts)
    whole = {text.encode() for text in texts}
    begun = {text[:n] for text in whole for n in range(1, len(text) + 1)}
    short = [(i, piece) for i, piece in enumerate(pieces()) if 0 < len(piece) <= 12]
    language = Regex(pattern).language(lm())
    choice = Choice(texts).language(lm())
    rng, split = random.Random(1), False
    for _ in range(12):
        spelt, state, other = b"", language.root(), choice.root()
        while True:
            expected = {i for i, piece in short if spelt + piece in begun}
            assert set(language.mask([state])[0].nonzero()[:, 0].tolist()) == expected, spelt
            assert set(choice.mask([other])[0].nonzero()[:, 0].tolist()) == expected, spelt
            assert state.accepting == other.accepting == (spelt in whole)
            if not expected:
                break
            token = rng.choice(sorted(expected))
            spelt, state, other = spelt + pieces()[token], language.child(state, token), choice.child(other, token)
            split = split or spelt.decode(errors="ignore").encode() != spelt
        assert spelt.decode() in texts
    assert split == ("α" in pattern)


def test_leading_space() -> None:
    assert b" foo" not in allowed(Regex("foo").language(lm()))
    assert b" foo" in allowed(Regex(" ?foo").language(lm()))
    assert pieces()[29856] == b" foo"


def test_eos_only_when_accepting() -> None:
    """EOS is masked at "", allowed at "a" and "ab". Here it is the pad token, too."""
    tokenizer = lm().tokenizer
    assert tokenizer.pad_token_id in (None, *lm().eos_ids)
    tracker = Tracker(batch(3), Regex("ab?").language(lm()))
    states = [walk(tracker.language, text) for text in ("", "a", "ab")]
    assert (tracker.table(states)[:, lm().eos_ids[0]] == 0).tolist() == [False, True, True]
    two = smc.TabularLM([0.25] * 4, [[0.25] * 4] * 4, (1, 3), tokens=["a", "<e1>", "b", "<e2>"], name="two ends")
    tracker = Tracker(batch(1, two), Regex("ab?").language(two))
    root = tracker.language.root()
    inside = tracker.language.child(root, 0)
    assert tracker.table([root, inside]).exp().tolist() == [[1, 0, 0, 0], [0, 1, 1, 1]]
    assert tracker.language.step(root, 1).alive is False


@pytest.mark.parametrize(
    "build",
    [
        lambda: Regex(r"[^\s\S]"),
        lambda: JsonSchema({"enum": []}),
        lambda: JsonSchema({"type": "integer", "minimum": 3, "maximum": 1}),
        lambda: JsonSchema(False),
        lambda: JsonSchema({"type": "object", "required": ["a"], "additionalProperties": False}),
        lambda: Grammar("start: A & B\nA: /a/\nB: /b/"),
        lambda: Choice([]),
    ],
)
def test_empty_language(build: object) -> None:
    """An error when it is built, or when it is started; the model has not run."""
    with pytest.raises(
        ValueError, match=r"allows no text|Unsatisfiable|no document satisfies|at least one text|start: A"
    ):
        build().start(batch(2))


def test_no_token_can_spell_it() -> None:
    tabular = smc.TabularLM([0.5, 0.5], [[0.5, 0.5]] * 2, 1, tokens=["a", "<eos>"], name="only a")
    for constraint in (Regex("b"), Choice(["b", "ab"])):
        with pytest.raises(ValueError, match="spell"):
            constraint.start(batch(2, tabular))
    with pytest.raises(ValueError, match="spell"):
        Regex("<eos>").start(batch(2, tabular))


def test_token_crosses_the_end() -> None:
    language = Regex("[0-9]{3} ?[0-9]").language(lm())
    after = allowed(language, "12")
    assert after == {str(d).encode() for d in range(10)}
    ended = allowed(Regex(r"a\.").language(lm()), "a")
    assert ended == {b"."}
    assert {b"..", b'."'} <= set(pieces())


@pytest.mark.parametrize(
    ("text", "valid"), [('{"a": "x"}', False), ('{"ab": "x"}', True), ('{"a": 1, "ab": "x"}', True)]
)
def test_additional_properties(text: str, valid: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    assert possible(JsonSchema(schema), text) is valid


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "number", "maximum": 1}, "0.5 1 -7 1.0", "01 1. 1.e2 .5 1e5 1.01 - +1"),
        ({"type": "number"}, "-0 0.5 -1e5 1E+3 1.0", "01 1. 1.e2 .5 -.5 1e Infinity NaN"),
        ({"type": "integer"}, "-0 7 -12", "1.0 1e2 00"),
    ],
)
def test_json_numbers(schema: dict, valid: str, invalid: str) -> None:
    """With a bound, llguidance leaves out some spellings that JSON has, "-0" and exponents: fewer texts, none wrong."""
    number = JsonSchema(schema)
    assert [text for text in valid.split() if not possible(number, text)] == []
    assert [text for text in invalid.split() if possible(number, text)] == []


def moved(rng: random.Random, n: int) -> Tensor:
    return torch.tensor([rng.randrange(n) for _ in range(n)])


@pytest.mark.parametrize(
    "constraint",
    [
        Regex(r"([a-z]+ ){3,40}[a-z]+\."),
        JsonSchema({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}),
        Grammar('start: sum\nsum: item ("+" item)*\nitem: /[0-9]+/ | "(" sum ")"'),
        Choice(["Paris", "Pariser Platz", "Lyon", "Lyons"]),
    ],
    ids=repr,
)
def test_masks_after_resampling(constraint: Constraint) -> None:
    """16 particles, 12 steps of a random legal token and random ancestors: every mask is that of a fresh state that
    replays the particle's tokens; the number of rows shrinks on the way."""
    rng, n = random.Random(0), 16
    rows = batch(n)
    tracker = Tracker(rows, constraint.language(lm()))
    rows.shared("tracker", lambda: tracker)
    history: list[list[int]] = [[] for _ in range(n)]
    diverged = False
    for step in range(12):
        table = tracker.table(tracker.states)
        for row, ids in enumerate(history):
            fresh = constraint.language(lm())
            state = fresh.root()
            for token in ids:
                state = fresh.child(state, token)
            assert torch.equal(tracker.table([tracker.states[row]])[0], table[row])
            expected = fresh.mask([state])[0]
            expected[list(lm().eos_ids)] = state.accepting
            assert torch.equal(table[row] == 0, expected), (ids, row)
        mask = tracker.language.mask(tracker.states)
        tokens = [rng.choice(m.nonzero()[:, 0].tolist() or [lm().eos_ids[0]]) for m in mask]
        rows.ended |= ~mask.any(dim=1)
        block = rows.block(torch.tensor(tokens)[:, None], step)
        tracker.read(block)
        history = [ids + [token] * bool(v) for ids, token, v in zip(history, tokens, block.valid[:, 0], strict=True)]
        diverged = diverged or len(set(map(tuple, history))) > len({tuple(ids[:-1]) for ids in history})
        kept = moved(rng, n) if step != 6 else moved(rng, n)[: n // 2]
        if step == 6:
            n //= 2
            rows.source = smc.Source(0, 1, n)
        rows.select(kept)
        history = [history[i] for i in kept.tolist()]
    assert diverged
    assert len(tracker.states) == 8


def test_rows_in_one_state_are_filled_once() -> None:
    language = Regex("[a-z]+").language(lm())
    filled: list[int] = []
    fill = language.fill
    language.fill = lambda states: (filled.append(len(states)), fill(states))
    root = language.root()
    one, two = (language.child(root, pieces().index(piece)) for piece in (b"a", b"the"))
    language.mask([one, two, one, one, two])
    language.mask([one, two])
    assert filled == [1, 2]


def test_limit_in_one_copy() -> None:
    """Whoever meets a limit of the engine says so; nobody answers with a mask of EOS alone."""
    constraint = Regex("(a|b)*a(a|b){8}", limits={"max_lexer_states": 60})
    language = constraint.language(lm())
    state = language.root()
    ids = {piece: i for i, piece in enumerate(pieces())}
    sibling = language.child(state, ids[b"b"])

    def go_on(state: State) -> None:
        for n in range(40):
            state = language.child(state, ids[b"ab"[n * n % 3 % 2 :][:1]])
            language.know([state])

    with pytest.raises(RuntimeError, match=r"Regex\('\(a\|b\)\*a.*too many states"):
        go_on(state)
    with pytest.raises(RuntimeError, match=r"limits"):
        language.know([sibling])
    unlimited = Regex("(a|b)*a(a|b){8}").language(lm())
    assert unlimited.mask([unlimited.root()]).sum() > 2


def test_special_tokens_in_free_text() -> None:
    mask = Regex(r"(.|\n)*").language(lm())
    allowed_ids = set(mask.mask([mask.root()])[0].nonzero()[:, 0].tolist())
    assert not allowed_ids & set(range(17))
    assert len(allowed_ids) > 48_000
    language = JsonSchema({"type": "string"}).language(lm())
    assert not language.mask([walk(language, '"ab')])[0, :17].any()


def test_whitespace_loops() -> None:
    free = {"type": "object"}
    assert possible(JsonSchema(free), '{"a": 1}')
    assert not walk(JsonSchema(free).language(lm()), "{      ").alive
    assert walk(JsonSchema(free, whitespace=r"\s*").language(lm()), "{" + " " * 300).alive
    assert not walk(JsonSchema(free, whitespace="").language(lm()), '{"a": ').alive


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "properties": {"a": {"not": {"type": "string"}}}}, "not"),
        ({"anyOf": [{"if": {"type": "string"}}]}, "if"),
        ({"type": "string", "minLenght": 3}, "minLenght"),
        ({"items": {"propertyNames": {"pattern": "a"}}}, "propertyNames"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "number", "divisibleBy": 2}, "divisibleBy"),
        ({"$defs": {"x": {"type": "string", "nullable": True}}, "$ref": "#/$defs/x"}, "nullable"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"prefixItems": [{"type": "integer"}], "additionalItems": False}, "additionalItems"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "string", "format": "made-up"}, "format"),
    ],
)
def test_unsupported_keyword(schema: dict, keyword: str) -> None:
    with pytest.raises(ValueError, match=keyword):
        JsonSchema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False},
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"enum": ["x"]}, "minItems": 2, "maxItems": 3},
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 40, "multipleOf": 7}]},
        {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 2}]},
        {"type": "string", "pattern": "^ab?"},
        {"type": "string", "pattern": "b$", "maxLength": 4},
        {"type": "string", "minLength": 2, "maxLength": 3},
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"], "maxProperties": 2},
        {"type": "object", "additionalProperties": {"type": "boolean"}, "minProperties": 1},
        {"type": ["integer", "null"], "exclusiveMaximum": 12, "exclusiveMinimum": -3},
        {"$defs": {"x": {"type": "boolean"}}, "type": "array", "items": {"$ref": "#/$defs/x", "enum": [True]}},
        {"type": "number", "multipleOf": 0.25, "minimum": -1, "maximum": 1},
        {"minLength": 3, "maxLength": 3, "type": ["string", "boolean"]},
    ],
    ids=str,
)
def test_documents_of_random_tokens_are_valid(schema: dict) -> None:
    """What is enforced is enforced: walks over the masks by random tokens end in documents that jsonschema accepts."""
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema)
    language = JsonSchema(schema).language(lm())
    rng, found = random.Random(3), 0
    for _ in range(60):
        state, spelt = language.root(), b""
        for _ in range(25):
            if state.accepting and (rng.random() < 0.5 or language.closes([state])[0]):
                validator.validate(json.loads(spelt))
                found += 1
                break
            ids = language.mask([state])[0].nonzero()[:, 0].tolist()
            ending = [i for i in ids if pieces()[i][-1:] in b'"}]' or pieces()[i] in (b"true", b"b")]
            token = rng.choice(ending if ending and rng.random() < 0.4 else ids)
            state, spelt = language.child(state, token), spelt + pieces()[token]
    assert found >= 10


def test_names_of_properties_are_not_keywords() -> None:
    JsonSchema({"type": "object", "properties": {"not": {"enum": [{"if": 1}]}, "x": {"default": {"contains": 1}}}})


def test_tokens_by_text() -> None:
    rows = batch(2)
    scorer = Bias({" Paris": 1.5}).start(rows)
    assert scorer.next_logits()[0].nonzero()[:, 0].tolist() == [pieces().index(b" Paris")]
    with pytest.raises(ValueError, match=r"no single token .* spells 'Paris is'"):
        Ban("Paris is").start(rows)
    with pytest.raises(ValueError, match=r"token id 49152 is outside"):
        Ban(49152).start(rows)
