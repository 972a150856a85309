"""Latent attention to the blocks of keys that a list names for each row, over quantised latents packed in one row."""

import torch
import torch_npu

import quant_indexer
from harness import ON_950, case, counted
from indexer import FORMS, HALVES
from latent import SCALE, Absorbed
from quant_indexer import EIGHT, QuantisedChoosing
from sparse import SIZES, Lists, compare
from tensors import BLOCK, arrange, lengths_on_device, npu, separate, stored

# Dtypes of the latents, and their largest numbers.
LARGEST = {torch.int8: 127.0} | ({EIGHT: 448.0} if ON_950 else {})
KINDS = list(LARGEST)
TILE = 128


def as_bytes(tensor):
    return tensor.contiguous().view(torch.int8)


class Quantised(Absorbed):
    """Latents of one byte an element with a scale for each tile; `latent` is what they stand for."""

    def __init__(self, rows, keys, heads, dtype, kind=torch.int8):
        super().__init__(rows, keys, heads, dtype)
        self.kind, self.packed = kind, []
        for i, latent in enumerate(self.latent):
            tiles = latent.float().unflatten(-1, (-1, TILE))
            scale = tiles.abs().amax(-1, keepdim=True) / LARGEST[kind]
            numbers = tiles / scale
            numbers = (numbers.round() if kind == torch.int8 else numbers).to(kind)
            self.latent[i] = (numbers.float() * scale).to(dtype).flatten(-2)
            parts = numbers.flatten(-2), self.key_rope[i], scale.squeeze(-1)
            self.packed.append(torch.cat([as_bytes(part) for part in parts], -1))


def arguments(lists, form, block=BLOCK):
    """A call's arguments. The packed rows are keys and values."""
    step, (queries, keys) = lists.step, form
    named = {
        "query": npu(arrange([torch.cat(parts, -1) for parts in zip(step.query, step.query_rope)], queries)),
        **stored({"key": step.packed}, step.keys, keys, block),
        "sparse_indices": npu(arrange(lists.numbers, queries)),
        "scale_value": SCALE,
        "key_quant_mode": 2,
        "value_quant_mode": 2,
        "actual_seq_lengths_query": lengths_on_device(step.rows, queries),
        "actual_seq_lengths_kv": lengths_on_device(step.keys, keys),
        "sparse_block_size": lists.size,
        "layout_query": queries,
        "layout_kv": keys,
        "sparse_mode": lists.mode,
        "attention_mode": 2,
    }
    named["key"] = named["value"] = named["key"].view(step.kind)
    return named


def call(**named):
    counted("npu_kv_quant_sparse_flash_attention")
    return torch_npu.npu_kv_quant_sparse_flash_attention(**named)


def attended_and_compared(lists, form, block=BLOCK):
    compare(lists, form, call(**arguments(lists, form, block)))


@case(form=FORMS, dtype=HALVES, kind=KINDS, mode=[0, 3], count=[4, 64])
def sequences_of_several_lengths(form, dtype, kind, mode, count):
    step = Quantised([5, 1, 9], [40, 7, 130], 8, dtype, kind)
    attended_and_compared(Lists(step, count, mode=mode), form)


@case(form=FORMS, size=SIZES, mode=[0, 3])
def sizes_of_blocks(form, size, mode):
    step = Quantised([4, 2], [100, 37], 8, torch.bfloat16)
    attended_and_compared(Lists(step, 5, size, mode), form)


@case(form=FORMS, heads=[1, 2, 16, 64, 128] + ([48] if ON_950 else []))
def numbers_of_heads(form, heads):
    step = Quantised([3, 1], [50, 9], heads, torch.bfloat16)
    attended_and_compared(Lists(step, 8), form)


@case(form=FORMS, dtype=HALVES, size=SIZES[:2])
def lists_that_end_early(form, dtype, size):
    step = Quantised([12, 5], [200, 30], 8, dtype)
    attended_and_compared(Lists(step, 20, size, some=True), form)


@case(form=FORMS, mode=[0, 3])
def rows_without_candidates(form, mode):
    """In mode 3 the first rows of a sequence with more rows than keys may read none."""
    step = Quantised([7, 2, 3], [4, 0, 30], 8, torch.float16)
    attended_and_compared(Lists(step, 6, mode=mode), form)


@case(form=FORMS[2:], block=[16, 48, 1024], kind=KINDS)
def block_sizes_of_caches(form, block, kind):
    step = Quantised([3, 1], [150, 17], 8, torch.bfloat16, kind)
    attended_and_compared(Lists(step, 40), form, block)


@case(mode=[0, 3])
def whole_tensors_need_no_lengths(mode):
    lists = Lists(Quantised([6] * 2, [50] * 2, 8, torch.float16), 16, mode=mode)
    named = {name: value for name, value in arguments(lists, FORMS[0]).items() if not name.startswith("actual")}
    compare(lists, FORMS[0], call(**named))


@case(form=FORMS)
def views_of_wider_tensors(form):
    """The extension passes what it gets, with its strides."""
    lists = Lists(Quantised([5, 3], [40, 12], 8, torch.float16), 16)
    named = arguments(lists, form)
    for name in ("query", "sparse_indices"):
        named[name] = torch.cat([named[name]] * 2, 1)[:, : named[name].shape[1]]
    compare(lists, form, call(**named))


@case(form=FORMS, rows=[(1, 1, 1), (40, 3, 1)])
def keys_that_the_indexer_chose(form, rows):
    """A layer with caches of one byte an element as engines compute it: the positions stay on the device."""
    rows, keys = list(rows), [300, 70, 5]
    chosen = quant_indexer.choose(**QuantisedChoosing(rows, keys).arguments(form), sparse_count=64)
    lists = Lists(Quantised(rows, keys, 16, torch.bfloat16), 64)
    output = call(**arguments(lists, form) | {"sparse_indices": chosen})
    lists.numbers = separate(chosen, form[0], rows, 1)
    compare(lists, form, output)
