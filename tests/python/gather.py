"""Keys and values of sequences out of a paged cache, one sequence behind the other."""

import torch
import torch_npu

from harness import ON_950, case, exact, reaching, refused
from scatter import draw
from tensors import ends, npu, shuffled_blocks, table

BLOCK, HEADS = 16, 2
LENGTHS = [40, 1, 16, 0, 33]
DTYPES = [torch.float16, torch.bfloat16, torch.int8]


class Paged:
    """Caches [blocks, block, N, D] of keys and values, in which sequences have shuffled blocks."""

    def __init__(self, dtype, offsets=None):
        self.offsets = offsets or [0] * len(LENGTHS)
        self.order = shuffled_blocks([length + offset for length, offset in zip(LENGTHS, self.offsets)], BLOCK, 2)
        shape = (self.order[1], BLOCK, HEADS)
        self.caches = draw((*shape, 64), dtype), draw((*shape, 32), dtype)

    def rows(self, cache):
        """The rows of all sequences, each from its offset on, which counts in whole blocks."""
        rows = []
        for blocks, length, offset in zip(self.order[0], LENGTHS, self.offsets):
            sequence = cache[blocks].flatten(0, 1)[offset // BLOCK * BLOCK :]
            rows.append(sequence[:length])
        return torch.cat(rows)

    def arguments(self, cumulative=False):
        lengths = [0, *ends(LENGTHS)] if cumulative else LENGTHS
        numbers = lambda values: npu(torch.tensor(values, dtype=torch.int32))
        return {
            "key_cache": npu(self.caches[0]),
            "value_cache": npu(self.caches[1]),
            "block_tables": npu(table(self.order)),
            "seq_lens": numbers(lengths),
            "key": npu(torch.zeros_like(self.rows(self.caches[0]))),
            "value": npu(torch.zeros_like(self.rows(self.caches[1]))),
            "seq_offset": numbers(self.offsets) if any(self.offsets) else None,
            "is_seq_lens_cumsum": cumulative,
        }

    def compare(self, key, value):
        exact(key, self.rows(self.caches[0]), "keys")
        exact(value, self.rows(self.caches[1]), "values")


def gathered(**arguments):
    """The tensors of the call that were written."""
    reaching("npu_gather_pa_kv_cache", "aclnnGatherPaKvCache", **arguments)
    return arguments["key"], arguments["value"]


@case(dtype=DTYPES, cumulative=[False, True])
def whole_sequences(dtype, cumulative):
    paged = Paged(dtype)
    paged.compare(*gathered(**paged.arguments(cumulative)))


@case(dtype=DTYPES, cumulative=[False, True])
def sequences_from_a_block_on(dtype, cumulative):
    paged = Paged(dtype, offsets=[16, 0, 32, 48, 20])
    paged.compare(*gathered(**paged.arguments(cumulative)))


@case(dtype=DTYPES)
def the_functional_form_leaves_its_tensors(dtype):
    paged = Paged(dtype)
    arguments = paged.arguments()
    paged.compare(*torch_npu.npu_gather_pa_kv_cache_functional(**arguments))
    exact(arguments["key"], torch.zeros_like(paged.rows(paged.caches[0])), "keys given")


@case(dtype=[torch.float32, torch.int32] if ON_950 else [])
def dtypes_of_ascend_950(dtype):
    paged = Paged(dtype)
    paged.compare(*gathered(**paged.arguments()))


# The rule that refuses a call with other arguments, which are made when it is called.
REFUSED = {
    "caches in single precision": ("gather.dtype", lambda given: {"key_cache": given["key_cache"].float()}),
    "keys of another dtype": ("gather.same_dtype", lambda given: {"key": given["key"].bfloat16()}),
    "long numbers in tables": ("gather.index_dtype", lambda given: {"block_tables": given["block_tables"].long()}),
    "too few lengths": ("gather.seq_lens", lambda given: {"seq_lens": given["seq_lens"][:2].contiguous()}),
    "values of fewer rows": ("gather.tokens", lambda given: {"value": given["value"][:9].contiguous()}),
    "keys of other heads": ("gather.cache_shape", lambda given: {"key": given["key"][:, :1].contiguous()}),
}


@case(what=list(REFUSED) if not ON_950 else [])
def calls_are_refused(what):
    rule, change = REFUSED[what]
    paged = Paged(torch.float16)
    arguments = paged.arguments()
    refused(lambda: torch_npu.npu_gather_pa_kv_cache(**arguments | change(arguments)), f"{rule}: ", "fix: ")
    paged.compare(*gathered(**arguments))
