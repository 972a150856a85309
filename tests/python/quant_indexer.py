"""Keys that the lightning indexer chooses among quantised ones, compared as those of `indexer` are."""

import torch
import torch_npu

from harness import ON_950, case, counted
from indexer import DIM, EXACT, FORMS, Choosing
from tensors import BLOCK, arrange, npu

EIGHT = torch.float8_e4m3fn
# Dtypes of queries and keys, of weights, and of scales.
KINDS = [(torch.int8, torch.float16, torch.float16)]
if ON_950:
    KINDS += [(EIGHT, torch.float16, torch.float16), (EIGHT, torch.bfloat16, torch.float32)]
# What brings scores near 1: INT8 numbers are large.
UNITS = {torch.int8: 2.0**-8, EIGHT: 2.0**-2}
# With INT8, weights and products are rounded to FLOAT16.
TOLERANCES = {torch.int8: (2e-2, 2e-3), EIGHT: EXACT}


def numbers(sequence, dtype):
    """Random numbers of a dtype of one byte, of those near 1."""
    return (sequence * 40).round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else sequence.to(dtype)


class QuantisedChoosing(Choosing):
    """Queries and keys of one byte, with a scale for each head of each row and for each key."""

    def __init__(self, rows, keys, heads=8, kind=KINDS[0]):
        dtype, weights, scales = kind
        super().__init__(rows, keys, heads, torch.float32, weights)
        self.tolerance = TOLERANCES[dtype]
        self.query, self.key = ([numbers(s, dtype) for s in sequences] for sequences in (self.query, self.key))
        draw = lambda like: [((torch.rand(*s.shape[:2], 1) + 0.5) * UNITS[dtype]).to(scales) for s in like]
        self.query_scale, self.key_scale = draw(self.query), draw(self.key)

    def kept(self):
        return super().kept() | {"key_dequant_scale": self.key_scale}

    def arguments(self, form, block=BLOCK):
        named = super().arguments(form, block)
        named["query_dequant_scale"] = npu(arrange(self.query_scale, form[0]).squeeze(-1))
        named["key_dequant_scale"] = named["key_dequant_scale"].squeeze(-1)
        return named | {"query_quant_mode": 0, "key_quant_mode": 0}

    def factors(self, i):
        return super().factors(i) * self.query_scale[i].double()

    def scores(self, i, mode):
        return super().scores(i, mode) * self.key_scale[i].double().squeeze(-1)


def choose(**arguments):
    counted("npu_quant_lightning_indexer")
    return torch_npu.npu_quant_lightning_indexer(**arguments)


def chosen_and_compared(choosing, form, mode=3, count=16, block=BLOCK):
    chosen = choose(**choosing.arguments(form, block), sparse_count=count, sparse_mode=mode)
    choosing.compare(form, chosen, mode=mode)


@case(form=FORMS, kind=KINDS, mode=[0, 3], count=[1, 16, 200])
def sequences_of_several_lengths(form, kind, mode, count):
    chosen_and_compared(QuantisedChoosing([5, 1, 9], [40, 7, 300], kind=kind), form, mode, count)


@case(form=FORMS, heads=[8, 16, 24, 32, 64] if ON_950 else [1, 3, 16, 64], kind=KINDS)
def numbers_of_heads(form, heads, kind):
    chosen_and_compared(QuantisedChoosing([4, 2], [100, 33], heads, kind), form)


@case(form=FORMS, kind=KINDS)
def numbers_of_the_largest_size(form, kind):
    """Products of INT8 then reach 2^21, which FLOAT16 has only since they are divided."""
    choosing = QuantisedChoosing([3, 2], [50, 20], kind=kind)
    largest = {torch.int8: 127, EIGHT: 448}[kind[0]]
    for sequences in (choosing.query, choosing.key):
        sequences[:] = [(s.double().sign() * largest).to(kind[0]) for s in sequences]
    chosen_and_compared(choosing, form)


@case(form=FORMS[2:], block=[16, 48, 1024], mode=[0, 3])
def block_sizes(form, block, mode):
    chosen_and_compared(QuantisedChoosing([3, 1], [150, 17]), form, mode, block=block)


@case(form=FORMS, mode=[0, 3])
def rows_without_candidates(form, mode):
    """In mode 3 the first rows of a sequence with more rows than keys may choose none."""
    chosen_and_compared(QuantisedChoosing([7, 2, 3], [4, 0, 30]), form, mode)


@case(form=FORMS[2:], kind=KINDS)
def many_keys(form, kind):
    chosen_and_compared(QuantisedChoosing([1, 2], [5000, 300], kind=kind), form, count=2048)


@case(mode=[0, 3])
def whole_tensors_need_no_lengths(mode):
    choosing = QuantisedChoosing([6] * 2, [50] * 2)
    arguments = choosing.arguments(FORMS[0])
    arguments = {name: value for name, value in arguments.items() if not name.startswith("actual")}
    choosing.compare(FORMS[0], choose(**arguments, sparse_count=16, sparse_mode=mode), mode=mode)


@case(form=FORMS)
def views_of_wider_tensors(form):
    """The extension passes what it gets, with its strides."""
    choosing = QuantisedChoosing([5, 3], [40, 12])
    arguments = choosing.arguments(form)
    for name in ("query", "weights", "query_dequant_scale"):
        arguments[name] = torch.cat([arguments[name]] * 2, 1)[:, : arguments[name].shape[1]]
    choosing.compare(form, choose(**arguments, sparse_count=16))
