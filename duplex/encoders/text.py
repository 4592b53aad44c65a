"""The text tower of an open_clip model (the Duplex paper's Eq. 2 and 7); `docs/method.md` explains the prefix tree."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as recompute

from duplex.encoders import prompt_tree
from duplex.encoders.image_blocks import LastBlocks, TowerBlocks
from duplex.encoders.prompt_tree import Ints, Prompts, PromptTree, TreeLayout
from duplex.errors import DuplexError, require
from duplex.system.threads import dtype_of, float32_arithmetic

QUICK = 1.702  # QuickGELU's constant
CHILDREN = {"ln_1", "attn", "ls_1", "ln_2", "mlp", "ls_2"}  # of a block that a prompt tree can run


class TokenFrame(NamedTuple):
    """The token ids that a tokenizer adds: before a text, after it, and as padding."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    padding: int


class Vocabulary:
    """A tokenizer and its embedding table `[V, width]`; DuplexError for untrained tokens (NaN)."""

    def __init__(self, table: Tensor, tokenizer: Any = None) -> None:
        self.table = table.detach()
        self._tokenizer = tokenizer
        self._untrained = frozenset(self.table.isnan().any(1).nonzero().flatten().tolist())

    @cached_property
    def tokenizer(self) -> Any:
        if self._tokenizer is not None:
            return self._tokenizer
        from open_clip import SimpleTokenizer

        return SimpleTokenizer()

    @cached_property
    def _inner(self) -> Any:
        return getattr(self.tokenizer, "tokenizer", self.tokenizer)

    @cached_property
    def frame(self) -> TokenFrame:
        ids = [int(i) for i in self.tokenizer(["a"], context_length=16)[0]]
        word = self._ids("a")
        start = next((i for i in range(len(ids)) if ids[i : i + len(word)] == word), None)
        if start is None:
            raise DuplexError(
                "prompts are joined from words, but this encoder's tokenizer splits a word differently "
                "within a text; choose another encoder, such as ViT-B-32"
            )
        closing = ids[start + len(word) :]
        pad = ids[-1]
        while closing and closing[-1] == pad:
            closing.pop()
        return TokenFrame(tuple(ids[:start]), tuple(closing), pad)

    def tokens(self, text: str) -> list[int]:
        ids = self._ids(text)
        if not self._untrained.isdisjoint(ids):
            for word in text.split():
                if not self._untrained.isdisjoint(self._ids(word)):
                    raise self._unknown(word)
            raise self._unknown(text)
        return ids

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(ids, dtype=torch.long, device=self.table.device)
        for token in index.flatten().tolist():
            if token in self._untrained:
                raise self._unknown(str(self._inner.decode([token])).strip())
        return self.table[index]

    def _ids(self, text: str) -> list[int]:
        if self._inner is self.tokenizer:
            return [int(i) for i in self.tokenizer.encode(text)]
        clean: Callable[[str], str] | None = getattr(self.tokenizer, "clean_fn", None)
        ids = self._inner.encode(clean(text) if clean else text, add_special_tokens=False)
        return [int(i) for i in ids]

    def _unknown(self, word: str) -> DuplexError:
        return DuplexError(
            f"this encoder's text tower was trained without the word {word!r}; "
            "choose another encoder (see `duplex encoders list`) or leave the word out"
        )


class ClipTextTower:
    """`TextTower` that runs the text part of an open_clip model; norms and positions are float32."""

    is_trained = False  # whether the blocks hold trained parameters, so that features change
    compiled: Callable[[TreeLayout, Tensor], Tensor] | None = None  # `encode_tree` of training steps; set by training
    # kind of prompts -> the tower for it, if another
    of_paths: Mapping[str, ClipTextTower] = MappingProxyType({})

    def __init__(self, model: Any, tokenizer: Any = None, *, precision: str = "fp32") -> None:
        text = getattr(model, "text", model)
        blocks = getattr(getattr(text, "transformer", None), "resblocks", None)
        if blocks is None:
            raise DuplexError(
                f"prompts need a text tower that takes token embeddings, and {type(text).__name__} "
                "does not; choose an encoder with open_clip's own text transformer, such as ViT-B-32 "
                "(`duplex encoders list` lists some)"
            )
        self.precision = precision
        self.image_projection: Tensor | None = None  # [w, d], of the image tower's normalised tokens
        self.vocabulary = Vocabulary(text.token_embedding.weight, tokenizer)
        wide = torch.float64 if text.positional_embedding.dtype == torch.float64 else torch.float32
        narrow = dtype_of(precision)
        self.dtype = wide if narrow == torch.float32 else narrow  # of matrix products
        self.blocks = _converted_blocks(blocks, self.dtype, wide)
        self.positions: Tensor = _widened(text.positional_embedding, wide)  # [positions, width]
        self.norm = _widened(text.ln_final, wide)
        self.projection = _widened(text.text_projection, wide)  # a matrix, a linear layer or None
        self.cls = _widened(getattr(text, "cls_emb", None), wide)  # [width] CoCa's last token
        for module in (self.blocks, self.norm, self.projection):
            if isinstance(module, nn.Module):
                module.eval().requires_grad_(False)
        self.mask: Tensor | None = text.attn_mask  # added to scores; None: all tokens see all others
        self.mask_padding = bool(getattr(text, "use_pad_mask", False))
        # whether CoCa's padding mask has the class token last (its position) or first
        self.cls_mask_after = bool(getattr(text, "correct_cls_mask", False))
        self.pool: str = getattr(text, "text_pool_type", None) or text.pool_type
        require(self.pool, ("argmax", "eos", "last", "first"), "pooling of a text tower")
        self.heads = int(blocks[0].attn.num_heads)
        self.width = int(self.positions.shape[1])
        self.dim = self.width
        if isinstance(self.projection, Tensor):
            self.dim = self.projection.shape[1]
        elif self.projection is not None:
            self.dim = self.projection.out_features
        self.context_length = int(text.context_length)  # without CoCa's class token
        self.logit_scale = float(model.logit_scale.detach()) if hasattr(model, "logit_scale") else 0.0
        # whether features are hidden states of end tokens
        self.pools_end = self.cls is None and self.pool in ("argmax", "eos")
        standard = all(_is_standard(block) for block in self.blocks)
        self.shares_prefixes = self.causal and self.pools_end and standard
        self._layouts: WeakKeyDictionary[PromptTree, dict[torch.device, TreeLayout]] = WeakKeyDictionary()

    @property
    def causal(self) -> bool:
        """Whether each token attends to itself and all earlier tokens, and to no others."""
        if self.mask is None or self.cls is not None or self.mask_padding:
            return False
        later = torch.ones_like(self.mask, dtype=torch.bool).triu(1)
        causal = torch.zeros_like(self.mask).masked_fill(later, float("-inf"))
        return bool(torch.equal(self.mask, causal))

    def finish(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.projection is None:
            return x
        return x @ self.projection if isinstance(self.projection, Tensor) else self.projection(x)

    def own_blocks(self) -> LastBlocks:
        """Replace the blocks with copies, so that adapters can be inserted; returns the copies."""
        self.blocks = copy.deepcopy(self.blocks)
        self.is_trained = True
        blocks = [nn.Sequential(block) for block in self.blocks]
        return LastBlocks(blocks, self.finish, ("ls_1", "ls_2"), ("ln_1", "ln_2"), of_text=True)

    def with_blocks(self, blocks: TowerBlocks) -> ClipTextTower:
        """A shallow copy of this tower that runs the given blocks instead of its own."""
        tower = copy.copy(self)
        tower.blocks = nn.ModuleList(block[-1] for block in blocks)
        return tower

    @property
    def start(self) -> int | None:
        return _single(self.vocabulary.frame.opening, "start")

    @property
    def end(self) -> int | None:
        return _single(self.vocabulary.frame.closing, "end")

    def tokens(self, text: str) -> list[int]:
        return self.vocabulary.tokens(text)

    def embedding(self, ids: Sequence[int] | Tensor) -> Tensor:
        return self.vocabulary.embedding(ids)

    def encode(self, tree: PromptTree, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        if not self.shares_prefixes:
            return self.encode_plain(tree.sequences(), lexicon, checkpoint=checkpoint)
        prompt_tree.check_length(tree.length, self.context_length)
        layouts = self._layouts.setdefault(tree, {})
        device = lexicon.device
        if device not in layouts:
            layouts[device] = TreeLayout.of(tree, len(self.blocks), self.heads, device)
        with float32_arithmetic(self.precision):
            if self.compiled is not None and torch.is_grad_enabled():
                return self.compiled(layouts[device], lexicon)
            return self.encode_tree(layouts[device], lexicon, checkpoint)

    def encode_plain(self, sequences: Prompts, lexicon: Tensor, *, checkpoint: bool = False) -> Tensor:
        rows = prompt_tree.pad_prompts(sequences)
        prompt_tree.check_length(rows.shape[1], self.context_length)
        padding = None
        if not (self.causal and self.pools_end):
            padding = self.vocabulary.embedding([self.vocabulary.frame.padding])[0]
        with float32_arithmetic(self.precision):
            return self.encode_separately(rows, lexicon, padding, checkpoint)

    def encode_separately(
        self, sequences: Ints, lexicon: Tensor, padding: Tensor | None, checkpoint: bool = False
    ) -> Tensor:
        """Features [P, dim] of `sequences` of row numbers of `lexicon` [P, L], padded with -1.

        padding: embedding [width] that fills prompts up to the context length; None if causal.
        """
        device = lexicon.device
        rows = torch.from_numpy(sequences).to(device)
        if padding is not None:
            rows = F.pad(rows, (0, self.context_length - rows.shape[1]), value=prompt_tree.PAD)
        real = rows != prompt_tree.PAD
        x = F.embedding(rows.clamp(min=0), lexicon)  # [P, L, width]
        filler = x.new_zeros(()) if padding is None else padding.to(x)
        x = torch.where(real[..., None], x, filler).to(self.positions.dtype)
        if self.cls is not None:
            x = torch.cat([x, self.cls.expand(len(x), 1, -1)], 1)
        x = x + self.positions[: x.shape[1]]
        mask = self._attention_mask(real, x)
        with self._autocast(device):
            for block in self.blocks:
                if checkpoint and x.requires_grad:
                    x = recompute(block, x, attn_mask=mask, use_reentrant=False)
                else:
                    x = block(x, attn_mask=mask)
        if self.pools_end:
            pooled = x[torch.arange(len(x), device=x.device), real.sum(1) - 1]
        else:
            pooled = x[:, 0] if self.cls is None and self.pool == "first" else x[:, -1]
        return self.finish(pooled.to(self.positions.dtype))

    def _autocast(self, device: torch.device, wanted: bool = True) -> torch.autocast:
        half = self.dtype in (torch.bfloat16, torch.float16)
        # without a cache, as adapters' weights change
        return torch.autocast(device.type, self.dtype, enabled=half and wanted, cache_enabled=False)

    def _attention_mask(self, real: Tensor, x: Tensor) -> Tensor | None:
        # [L, L], or [P * heads, L, L] if padding is masked, too; None if there is none
        length = x.shape[1]
        mask = None if self.mask is None else self.mask[:length, :length].to(x)
        if self.cls is None and not self.mask_padding:
            return mask
        valid = real
        if self.cls is not None:
            one = torch.ones_like(real[:, :1])
            valid = torch.cat([real, one] if self.cls_mask_after else [one, real], 1)
        hidden = torch.zeros_like(valid, dtype=x.dtype).masked_fill(~valid, float("-inf"))  # [P, L]
        each = hidden[:, None].expand(-1, length, -1).repeat_interleave(self.heads, 0)
        return each if mask is None else each + mask

    @torch.no_grad()
    def encode_blocks(self, sequences: Prompts, lexicon: Tensor, block: int = 4096) -> Tensor:
        rows = prompt_tree.pad_prompts(sequences)
        features = lexicon.new_empty((len(rows), self.dim), dtype=self.positions.dtype)
        for prompts, tree in prompt_tree.tree_blocks(rows, block):
            features[torch.from_numpy(prompts).to(features.device)] = self.encode(tree, lexicon)
        return features

    def encode_tree(self, layout: TreeLayout, lexicon: Tensor, checkpoint: bool = False) -> Tensor:
        """Features [P, dim] of the prompts that a tree lays out; `lexicon`: token embeddings [V, width]."""
        x = F.embedding(layout.entry_rows, lexicon).to(self.positions.dtype)
        x = x + self.positions[layout.entry_depths]  # [E, width]
        # trained weights are float32; frozen ones have the tower's type already
        with self._autocast(lexicon.device, self.is_trained):
            for block, plan in zip(self.blocks, layout.layers, strict=True):
                if checkpoint and x.requires_grad:
                    x = recompute(self._layer, block, x, plan, use_reentrant=False)
                else:
                    x = self._layer(block, x, plan)
        return F.embedding(layout.ends, self.finish(x))

    def _layer(self, block: Any, x: Tensor, plan: prompt_tree.AttentionPlan) -> Tensor:
        attention = block.attn
        states = F.linear(block.ln_1(x).to(self.dtype), attention.in_proj_weight, attention.in_proj_bias)
        o = attention.out_proj(prompt_tree.attend(states, plan))
        if plan.query_states is not None:
            x = F.embedding(plan.query_states, x)  # unlike indexing, sums gradients in a fixed order
            if self.is_trained:
                block.ln_1(x)  # an adapter beside the attention reads what last entered this norm
        x = x + block.ls_1(o.to(x.dtype))
        output: Tensor = x + block.ls_2(_mlp(block.mlp, block.ln_2(x).to(self.dtype)).to(x.dtype))
        return output


def _is_standard(block: Any) -> bool:
    if {name for name, _ in block.named_children()} != CHILDREN:
        return False
    return isinstance(block.attn, nn.MultiheadAttention) and block.attn.in_proj_bias is not None


def _converted_blocks(blocks: nn.ModuleList, narrow: torch.dtype, wide: torch.dtype) -> nn.ModuleList:
    if narrow == wide and all(weight.dtype == wide for weight in blocks.parameters()):
        return blocks
    blocks = copy.deepcopy(blocks).to(wide)
    for module in blocks.modules():
        if isinstance(module, nn.Linear | nn.MultiheadAttention):
            module.to(narrow)
    return blocks


def _widened(part: Any, wide: torch.dtype) -> Any:
    if isinstance(part, nn.Module):
        is_wide = all(weight.dtype == wide for weight in part.parameters())
        return part if is_wide else copy.deepcopy(part).to(wide)
    return None if part is None else part.detach().to(wide)


def _single(ids: tuple[int, ...], name: str) -> int | None:
    if len(ids) > 1:
        raise DuplexError(f"this encoder has {len(ids)} {name} tokens, but prompts have one; choose, say, ViT-B-32")
    return ids[0] if ids else None


def _mlp(mlp: Any, h: Tensor) -> Tensor:
    # torch.compile fuses this itself; of the sums below, torch 2.13 drops `alpha` without a word
    if type(mlp.gelu).__name__ != "QuickGELU" or torch.compiler.is_compiling():
        output: Tensor = mlp(h)
        return output
    # QuickGELU, x sigmoid(1.702 x), is silu(z) / 1.702 with z = 1.702 x: one pass and one saved tensor
    # [n, 4 * width], where open_clip's code takes three of each
    z = torch.addmm(mlp.c_fc.bias, h, mlp.c_fc.weight.t(), beta=QUICK, alpha=QUICK)
    return torch.add(mlp.c_proj.bias, F.linear(F.silu(z), mlp.c_proj.weight), alpha=1 / QUICK)
