"""Latent attention to the blocks of keys that a list names for each row."""

import torch
import torch_npu

from harness import ON_950, TOLERANCE, case, close, counted
from indexer import FORMS, HALVES, Choosing, choose
from latent import SCALE, Absorbed
from reference import train
from tensors import BLOCK, arrange, lengths_on_device, npu, separate, stored

SIZES = [1] if ON_950 else [1, 2, 4, 8, 16]


def candidates(rows, keys, mode):
    """How many keys, from the first, each row may read."""
    return [keys if mode == 0 else max(0, keys - rows + row + 1) for row in range(rows)]


class Lists:
    """For each row of each sequence up to `count` numbers of blocks in no order, then -1."""

    def __init__(self, step, count, size=1, mode=3, some=False):
        self.step, self.size, self.mode = step, size, mode
        self.numbers = [torch.full((1, rows, count), -1, dtype=torch.int32) for rows in step.rows]
        for numbers, rows, keys in zip(self.numbers, step.rows, step.keys):
            for row, allowed in enumerate(candidates(rows, keys, mode)):
                chosen = torch.randperm(-(-allowed // size))[:count]
                if some:
                    chosen = chosen[: torch.randint(len(chosen) + 1, ())]
                numbers[0, row, : len(chosen)] = chosen

    def visible(self, i):
        """Which keys [rows, keys] the rows of a sequence read."""
        step = self.step
        result = torch.zeros(step.rows[i], step.keys[i], dtype=torch.bool)
        for row, allowed in enumerate(candidates(step.rows[i], step.keys[i], self.mode)):
            for number in self.numbers[i][0, row].tolist():
                if number >= 0:
                    result[row, number * self.size : min((number + 1) * self.size, allowed)] = True
        return result


def arguments(lists, form, block=BLOCK):
    """A call's arguments. The latents are keys and values."""
    step, (queries, keys) = lists.step, form
    named = {
        "query": npu(arrange(step.query, queries)),
        "query_rope": npu(arrange(step.query_rope, queries)),
        **stored({"key": step.latent, "key_rope": step.key_rope}, step.keys, keys, block),
        "sparse_indices": npu(arrange(lists.numbers, queries)),
        "scale_value": SCALE,
        "actual_seq_lengths_query": lengths_on_device(step.rows, queries),
        "actual_seq_lengths_kv": lengths_on_device(step.keys, keys),
        "sparse_block_size": lists.size,
        "layout_query": queries,
        "layout_kv": keys,
        "sparse_mode": lists.mode,
        "attention_mode": 2,
    }
    return named | {"value": named["key"]}


def call(**named):
    counted("npu_sparse_flash_attention")
    return torch_npu.npu_sparse_flash_attention(**named)


def expected(lists, i):
    """Output [N, rows, 512], and of each row the largest score and the sum [N, rows], 0 where it reads no key."""
    step, visible = lists.step, lists.visible(i)
    query = torch.cat([step.query[i], step.query_rope[i]], -1)
    key = torch.cat([step.latent[i], step.key_rope[i]], -1)
    output, largest, total = train(query, key, step.latent[i], SCALE, visible)
    unseen = ~visible.any(-1)
    return output, largest.masked_fill(unseen, 0), total.masked_fill(unseen, 0)


def compare(lists, form, output, largest=None, total=None):
    step = lists.step
    outputs = separate(output, form[0], step.rows, step.heads)
    for i, rows in enumerate(step.rows):
        wanted = expected(lists, i)
        close(outputs[i], wanted[0], f"output of sequence {i}")
        if form[0] == "BSND":
            assert (output[i, rows:] == 0).all(), f"rows behind sequence {i} are not 0"
        if largest is None:
            continue
        for what, actual, want in (("maxima", largest, wanted[1]), ("sums", total, wanted[2])):
            by_sequence = actual[:, 0, :rows] if form[0] == "BSND" else actual[0].split(step.rows)
            close(by_sequence[i].transpose(0, 1), want, f"{what} of sequence {i}", TOLERANCE[torch.float32])


def attended_and_compared(lists, form, block=BLOCK):
    output, _, _ = call(**arguments(lists, form, block))
    compare(lists, form, output)


@case(form=FORMS, dtype=HALVES, mode=[0, 3], count=[4, 64])
def sequences_of_several_lengths(form, dtype, mode, count):
    step = Absorbed([5, 1, 9], [40, 7, 130], 8, dtype)
    attended_and_compared(Lists(step, count, mode=mode), form)


@case(form=FORMS, size=SIZES, mode=[0, 3])
def sizes_of_blocks(form, size, mode):
    step = Absorbed([4, 2], [100, 37], 8, torch.bfloat16)
    attended_and_compared(Lists(step, 5, size, mode), form)


@case(size=[32, 64, 128] if not ON_950 else [], form=FORMS)
def large_blocks(size, form):
    step = Absorbed([2, 3], [300, 130], 4, torch.float16)
    attended_and_compared(Lists(step, 2, size), form, block=256)


@case(form=FORMS, heads=[1, 2, 16, 64, 128] + ([3, 48] if ON_950 else []))
def numbers_of_heads(form, heads):
    step = Absorbed([3, 1], [50, 9], heads, torch.bfloat16)
    attended_and_compared(Lists(step, 8), form)


@case(form=FORMS[:2], dtype=HALVES, size=SIZES[::2], mode=[0, 3])
def maxima_and_sums(form, dtype, size, mode):
    lists = Lists(Absorbed([6, 3], [60, 5], 8, dtype), 8, size, mode, some=True)
    compare(lists, form, *call(**arguments(lists, form), return_softmax_lse=True))


@case(form=FORMS, dtype=HALVES, size=SIZES[:2])
def lists_that_end_early(form, dtype, size):
    step = Absorbed([12, 5], [200, 30], 8, dtype)
    attended_and_compared(Lists(step, 20, size, some=True), form)


@case(form=FORMS, mode=[0, 3])
def rows_without_candidates(form, mode):
    """In mode 3 the first rows of a sequence with more rows than keys may read none."""
    step = Absorbed([7, 2, 3], [4, 0, 30], 8, torch.float16)
    attended_and_compared(Lists(step, 6, mode=mode), form)


@case(form=FORMS[2:], block=[16, 48, 1024])
def block_sizes_of_caches(form, block):
    step = Absorbed([3, 1], [150, 17], 8, torch.bfloat16)
    attended_and_compared(Lists(step, 40), form, block)


@case(mode=[0, 3])
def whole_tensors_need_no_lengths(mode):
    lists = Lists(Absorbed([6] * 2, [50] * 2, 8, torch.float16), 16, mode=mode)
    named = {name: value for name, value in arguments(lists, FORMS[0]).items() if not name.startswith("actual")}
    compare(lists, FORMS[0], call(**named)[0])


@case(form=FORMS)
def views_of_wider_tensors(form):
    """The extension passes what it gets, with its strides."""
    lists = Lists(Absorbed([5, 3], [40, 12], 8, torch.float16), 16)
    named = arguments(lists, form)
    for name in ("query", "query_rope", "sparse_indices"):
        named[name] = torch.cat([named[name]] * 2, 1)[:, : named[name].shape[1]]
    compare(lists, form, call(**named)[0])


@case(form=FORMS, dtype=HALVES, rows=[(1, 1, 1), (40, 3, 1)])
def keys_that_the_indexer_chose(form, dtype, rows):
    """A layer as engines compute it: the positions stay on the device."""
    rows, keys = list(rows), [300, 70, 5]
    chosen, _ = choose(**Choosing(rows, keys, dtype=dtype).arguments(form), sparse_count=64)
    lists = Lists(Absorbed(rows, keys, 16, dtype), 64)
    output, _, _ = call(**arguments(lists, form) | {"sparse_indices": chosen})
    lists.numbers = separate(chosen, form[0], rows, 1)
    compare(lists, form, output)
