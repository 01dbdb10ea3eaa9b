"""A Hugging Face decoder run over pages, and the check at loading that it then gives what it gives by itself."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from smcsample.lm.attention import Forward, Own, Part, Plan, attending_to_pages, by_plan, register
from smcsample.lm.graphs import Capture, CudaCapture
from smcsample.lm.kv_pool import PagePool
from smcsample.lm.paging import Pages

PLAIN_LAYERS = {"full_attention", "sliding_attention"}
"""Layers that keep keys and values and nothing else, and whose attention function is told all that they see."""

TOLERANCE = {torch.float32: 0.02, torch.float64: 0.02}
"""How far logits may be from the model's own, as a part of the largest one; 0.1 in half precision. An int8 copy, whose
activations are rounded too, is off by .002; attention that is not understood by 0.3 and more."""


class Decoder:
    """Forwards of a model whose layers attend to pages. `bytes_per_token`: of keys and values.

    `capture`: what records its forwards (see `smcsample.lm.graphs`), on a GPU; None: nothing does.

    The model is tried on seven tokens at once, so that one that can't be followed is refused before it does any work.

    Raises:
        ValueError: a model that can't be run that way; the message says which, and why.
    """

    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self._name = f"model {name} ({type(model).__name__})"
        parameters = inspect.signature(model.forward).parameters
        self._keeps_few = "logits_to_keep" in parameters
        self._refuse_by_structure(parameters)
        register()
        configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
        self._configs = list(configs.values())
        self.bytes_per_token = self._compare()
        self.capture: Capture | None = CudaCapture() if model.device.type == "cuda" else None

    def forward(self, tokens: Int[Tensor, "row step"], step: Forward, keep: int) -> Float[Tensor, "row kept vocab"]:
        """Logits after each of the last `keep` tokens."""
        few = {"logits_to_keep": keep} if self._keeps_few else {}
        positions = step.positions.clamp(min=0).long()  # a row that is only along is at −1, where no embedding is
        with torch.inference_mode(), attending_to_pages(self._configs):
            out = self.model(input_ids=tokens, position_ids=positions, smcsample_forward=step, use_cache=False, **few)
        return out.logits[:, -keep:]

    def give_up_capture(self, error: Exception) -> None:
        """Run without recording from here on, and say why."""
        self.capture = None
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(
            f"{self._name} can't be recorded as a CUDA graph ({type(error).__name__}: {reason}), so every launch of it "
            "costs the host's time; load_model(…, graphs=False) says that this is known",
            RuntimeWarning,
            stacklevel=2,
        )

    def _refuse_by_structure(self, parameters: Any) -> None:
        config = self.model.config
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{self._name} is an encoder–decoder; smcsample needs a decoder-only model")
        strange = set(getattr(config.get_text_config(), "layer_types", None) or ()) - PLAIN_LAYERS
        if getattr(self.model, "_is_stateful", False) or strange:
            layers = f" (layers: {', '.join(sorted(strange))})" if strange else ""
            raise ValueError(f"{self._name} keeps more than keys and values{layers}; that can't follow rows yet")
        if "position_ids" not in parameters:
            raise ValueError(f"{self._name} takes no position_ids, so unequal prompts can't stand side by side")
        if not getattr(self.model, "_supports_attention_backend", False):
            raise ValueError(
                f"{self._name} computes its attention itself instead of calling transformers' AttentionInterface, so "
                "its keys and values can't be kept in pages"
            )

    def _compare(self) -> int:
        """Seven tokens of two particles: four prefilled at once, then two, then one. Returns bytes per token."""
        n, device = 7, self.model.device
        ids = (torch.arange(1, n + 1, device=device) % self.model.config.get_text_config().vocab_size)[None]
        with torch.inference_mode():
            expected = self.model(input_ids=ids, position_ids=torch.arange(n, device=device)[None], use_cache=False)
        expected = expected.logits[0].float()
        pool = PagePool(4, 8, device)
        pages = Pages(pool)
        pages.open(1)
        rows, got = torch.zeros(1, dtype=torch.long, device=device), []
        for start, stop in ((0, 4), (4, 6), (6, 7)):
            writes = pages.extend(rows, stop - start)
            plan = None
            if by_plan(ids):
                earlier = [Part(slice(0, len(rows)), slice(0, 4))] if start else []
                own = Own(writes.slots, None, causal=True)
                if start:
                    slots = pages.tables[rows, 1:2].long() * 4 + torch.arange(stop - 4)
                    later = torch.arange(4, stop) > torch.arange(start, stop)[:, None]
                    own = Own(slots, torch.zeros(later.shape).masked_fill(later, -torch.inf)[None, None])
                plan = Plan(earlier, own)
            forward = Forward(pool, writes.slots, writes.positions, pages.tables[rows], stop - 1, plan)
            try:
                logits = self.forward(ids[:, start:stop].expand(len(rows), -1), forward, stop - start)
            except NotImplementedError as error:
                raise ValueError(f"{self._name} can't be followed: {error}") from None
            self._check_layers(forward)
            got.append(logits[-1].float())
            if start == 0:
                pages.select(torch.zeros(2, dtype=torch.long, device=device))
                rows = torch.arange(2, device=device)
        scale = max(1.0, float(expected.abs().max()))
        off = float((torch.cat(got) - expected).abs().max()) / scale
        if not off <= TOLERANCE.get(self.model.dtype, 0.1):
            raise ValueError(
                f"{self._name} gives other logits when its layers attend to pages (off by {off:.1e} of the largest), "
                "so something in its attention is not known here; it can't be followed"
            )
        return pool.bytes_per_page // 4

    def _check_layers(self, forward: Forward) -> None:
        """Every layer attended once, and every layer with a window was told of it."""
        config = self.model.config.get_text_config()
        layers = list(range(config.num_hidden_layers))
        if sorted(forward.windows) != layers or forward.calls != len(layers):
            raise ValueError(
                f"{self._name} has {len(layers)} layers but attended {forward.calls} times, in layers "
                f"{sorted(forward.windows)}; each must call transformers' AttentionInterface once"
            )
        kinds = getattr(config, "layer_types", None)
        for layer in layers:
            window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
            slides = kinds[layer] == "sliding_attention" if kinds else window is not None
            if slides and forward.windows[layer] is None:
                raise ValueError(
                    f"{self._name} has a sliding window in layer {layer} that it does not tell its attention function"
                )
