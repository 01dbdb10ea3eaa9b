"""A Hugging Face causal language model with its tokenizer, checked once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from smcsample.lm.decoder import Decoder
from smcsample.lm.packed import pack_linears, packable
from smcsample.lm.paged import PagedStream
from smcsample.lm.prompt import Prompt, is_chat

if TYPE_CHECKING:
    from smcsample.lm.batch import Batch


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A model and its tokenizer. Build it with `load_model`.

    Ids beyond the tokenizer's (rows that pad the output matrix) are not tokens: their logits are cut off before any
    softmax, so models of one tokenizer agree on the vocabulary whatever their padding.

    Raises:
        ValueError: a model whose rows can't be followed, and why: an encoder–decoder, a recurrent state, attention of
            its own making (see `smcsample.lm.decoder.Decoder`).
    """

    model: Any
    tokenizer: Any
    name: str
    vocab_size: int = field(init=False)
    context_length: int | None = field(init=False)
    decoder: Decoder = field(init=False, repr=False)
    eos_ids: tuple[int, ...] = field(init=False)
    """Every id that ends a text: the generation config's and the tokenizer's."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "decoder", Decoder(self.model, self.name))
        text = self.model.config.get_text_config()
        eos: set[int] = set()
        for given in (getattr(self.model.generation_config, "eos_token_id", None), self.tokenizer.eos_token_id):
            eos.update([given] if isinstance(given, int) else given or [])
        object.__setattr__(self, "vocab_size", min(text.vocab_size, len(self.tokenizer)))
        object.__setattr__(self, "context_length", getattr(text, "max_position_embeddings", None))
        object.__setattr__(self, "eos_ids", tuple(sorted(eos)))

    @property
    def device(self) -> torch.device:
        return self.model.device

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        return self.tokenizer.get_vocab()

    def vocabulary(self) -> object:
        return self._vocabulary

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of text (with the tokenizer's special tokens), of chat messages (by its template), or as given.

        Raises:
            ValueError: chat messages for a tokenizer without a chat template.
        """
        if isinstance(prompt, str):
            return list(self.tokenizer(prompt)["input_ids"])
        if is_chat(prompt):
            if not self.tokenizer.chat_template:
                raise ValueError(f"it is chat messages, but {self.name} has no chat template; give text")
            text = self.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return [int(i) for i in prompt]  # pyright: ignore[reportArgumentType]

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def check_prompt(self, ids: Sequence[int]) -> None:
        if len(ids) == 0:
            raise ValueError(f"it is empty; {self.name} needs at least one token to continue from (its BOS, say)")

    @property
    def bytes_per_token(self) -> int:
        """Memory that the keys and values of one token take."""
        return self.decoder.bytes_per_token

    def stream(self, batch: Batch) -> PagedStream:
        return PagedStream(self.decoder, self.name, self.vocab_size, batch)

    def __repr__(self) -> str:
        return f"CausalLM({self.name!r})"


def load_model(
    source: str | os.PathLike[str] | tuple[Any, Any] | list[Any] | CausalLM,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    name: str | None = None,
    pack: bool | None = None,
    graphs: bool | None = None,
    **kwargs: Any,
) -> CausalLM:
    """Load a causal language model.

    Args:
        source: a Hugging Face name, a folder, a `.gguf` file, or a pair (model, tokenizer) already loaded (the model
            is put in evaluation mode; `device` and `dtype` then are its own).
        device: default: CUDA if there is one, else the CPU.
        dtype: default: the checkpoint's on a GPU, float32 on a CPU.
        name: what messages call the model; default: the source's own name.
        pack: put the weights of linear layers into the layout that a CPU multiplies fastest (see
            `smcsample.lm.packed`): for inference only, and such a model can't be saved. Default: on a CPU, for a model
            that is loaded here; one that is given already loaded is left as it is.
        graphs: replay the model's decoding steps as CUDA graphs (see `smcsample.lm.graphs`); hooks on its modules then
            do not run. Default: on a GPU.
        kwargs: passed to `AutoModelForCausalLM.from_pretrained` (`revision=`, `token=`, …).

    Raises:
        TypeError: a source of another kind.
        FileNotFoundError: a path that does not exist.
        ImportError: a GGUF file without the packages that read it.
        ValueError: a model whose rows can't be followed (see `CausalLM`), a CUDA device that is not there,
            `pack=True` where it does not help, `graphs=True` without a GPU.
    """
    lm = _load(source, device=device, dtype=dtype, name=name, pack=pack, **kwargs)
    if graphs and lm.device.type != "cuda":
        raise ValueError(f"graphs = True, but {lm.name} is on {lm.device}, and CUDA graphs need a GPU; leave it out")
    if graphs is False:
        lm.decoder.capture = None
    return lm


def _load(
    source: str | os.PathLike[str] | tuple[Any, Any] | list[Any] | CausalLM,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    name: str | None,
    pack: bool | None,
    **kwargs: Any,
) -> CausalLM:
    if isinstance(source, CausalLM):
        return source
    if isinstance(source, (tuple, list)) and len(source) == 2 and hasattr(source[0], "forward"):
        model, tokenizer = source
        _pack(model, bool(pack))
        return CausalLM(model.eval(), tokenizer, name or model.config.name_or_path or type(model).__name__)
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(
            f"source is a {type(source).__name__}; give a name, a path, a .gguf file, or a pair (model, tokenizer)"
        )

    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device = {str(device)!r}, but this PyTorch sees no CUDA device; use device='cpu'")
    where = os.path.expanduser(source)
    if where.startswith((os.sep, ".")) and not os.path.exists(where):
        raise FileNotFoundError(f"source = {where!r}: there is no such file or folder")
    kwargs["dtype"] = dtype or ("auto" if device.type == "cuda" else torch.float32)
    shared = {key: kwargs[key] for key in ("revision", "token", "cache_dir", "trust_remote_code") if key in kwargs}
    if where.endswith(".gguf"):
        path = Path(where)
        if not path.is_file():
            raise FileNotFoundError(f"source = {where!r}: there is no such GGUF file")
        name, where = name or path.stem, str(path.parent)
        shared["gguf_file"] = kwargs["gguf_file"] = path.name
    tokenizer = AutoTokenizer.from_pretrained(where, **shared)
    model: Any = AutoModelForCausalLM.from_pretrained(where, **kwargs)
    model = model.eval().to(device)
    _pack(model, packable(model) if pack is None else pack)
    return CausalLM(model, tokenizer, name or where)


def _pack(model: Any, wanted: bool) -> None:
    if wanted and not packable(model):
        raise ValueError(
            f"pack = True, but it does not help {model.dtype} on {model.device} here (it needs a CPU, and for bfloat16 "
            "one that multiplies it); leave it out"
        )
    if wanted:
        pack_linears(model)
