"""Keys that the lightning indexer chooses. Positions differ where scores are equal, so their scores are compared."""

import torch
import torch_npu

from harness import ON_950, case, close, counted
from reference import full, right_down
from tensors import BLOCK, arrange, lengths_on_device, npu, separate, stored

HALVES = [torch.float16, torch.bfloat16]
# Layouts of queries and of keys.
FORMS = [("BSND", "BSND"), ("TND", "TND"), ("BSND", "PA_BSND"), ("TND", "PA_BSND")]
DIM = 128
# How far scores may be from exact ones: absolutely, and of their size. The operator sums in single precision.
EXACT = (1e-3, 1e-4)


def in_order(found):
    """The scores of each row, the best first, as the operator gives them but on Ascend 950."""
    return found.sort(descending=True).values if ON_950 else found


class Choosing:
    """Queries [N, rows, 128] with weights [N, rows, 1], which choose among keys [1, keys, 128]."""

    def __init__(self, rows, keys, heads=8, dtype=torch.float16, weights=None):
        self.rows, self.keys = rows, keys
        draw = lambda heads, lengths, dim: [torch.randn(heads, n, dim).to(dtype) for n in lengths]
        self.query, self.key = draw(heads, rows, DIM), draw(1, keys, DIM)
        self.weights = [w.to(weights or dtype) for w in draw(heads, rows, 1)]
        self.tolerance = EXACT

    def kept(self):
        """What a cache keeps of the keys, by the names of arguments."""
        return {"key": self.key}

    def factors(self, i):
        """What the products of a sequence's queries count, [N, rows, 1]."""
        return self.weights[i].double()

    def arguments(self, form, block=BLOCK):
        queries, keys = form
        return {
            "query": npu(arrange(self.query, queries)),
            "weights": npu(arrange(self.weights, queries).squeeze(-1)),
            **stored(self.kept(), self.keys, keys, block),
            "actual_seq_lengths_query": lengths_on_device(self.rows, queries),
            "actual_seq_lengths_key": lengths_on_device(self.keys, keys),
            "layout_query": queries,
            "layout_key": keys,
        }

    def scores(self, i, mode):
        """The scores [rows, keys] of a sequence; -inf for keys that a row may not choose."""
        products = self.query[i].double() @ self.key[i].double().transpose(1, 2)
        scores = (self.factors(i) * products.relu()).sum(0)
        visible = (right_down if mode == 3 else full)(self.rows[i], self.keys[i])
        return scores.masked_fill(~visible, -torch.inf)

    def compare(self, form, chosen, values=None, mode=3):
        for i, positions in enumerate(separate(chosen, form[0], self.rows, 1)):
            self.compare_sequence(i, positions[0].long(), mode)
        if values is not None:
            for i, found in enumerate(separate(values, form[0], self.rows, 1)):
                close(in_order(found[0]), self.best(self.scores(i, mode), values.shape[-1]), f"values of sequence {i}")
        if form[0] == "BSND":
            for i, rows in enumerate(self.rows):
                assert (chosen[i, rows:] == -1).all(), f"rows behind sequence {i} choose keys"
                assert values is None or values[i, rows:].isneginf().all(), f"rows behind sequence {i} have values"

    def compare_sequence(self, i, positions, mode):
        count, keys = positions.shape[1], self.keys[i]
        assert ((positions >= -1) & (positions < keys)).all(), f"sequence {i}: positions beyond its {keys} keys"
        ended = positions[:, :-1] < 0
        assert not (ended & (positions[:, 1:] >= 0)).any(), f"sequence {i}: positions behind a -1"
        ordered = positions.sort().values
        twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
        assert not twice.any(), f"sequence {i}: a row chooses a key twice"
        scores = self.scores(i, mode)
        # A position of -1 reads the column behind the last key.
        found = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf).gather(1, positions % (keys + 1))
        close(in_order(found), self.best(scores, count), f"scores of sequence {i}", self.tolerance)

    @staticmethod
    def best(scores, count):
        """The best scores of each row, -inf behind the last."""
        best = scores.sort(descending=True).values[:, :count]
        return torch.nn.functional.pad(best, (0, count - best.shape[1]), value=-torch.inf)


def choose(**arguments):
    counted("npu_lightning_indexer")
    return torch_npu.npu_lightning_indexer(**arguments)


def chosen_and_compared(choosing, form, mode=3, count=16, block=BLOCK):
    chosen, _ = choose(**choosing.arguments(form, block), sparse_count=count, sparse_mode=mode)
    choosing.compare(form, chosen, mode=mode)


@case(form=FORMS, dtype=HALVES, mode=[0, 3], count=[1, 16, 200])
def sequences_of_several_lengths(form, dtype, mode, count):
    chosen_and_compared(Choosing([5, 1, 9], [40, 7, 300], dtype=dtype), form, mode, count)


@case(form=FORMS, heads=[8, 16, 24, 32, 64] if ON_950 else [1, 3, 16, 64], dtype=HALVES)
def numbers_of_heads(form, heads, dtype):
    chosen_and_compared(Choosing([4, 2], [100, 33], heads, dtype), form)


@case(form=FORMS if not ON_950 else [], dtype=HALVES)
def weights_in_single_precision(form, dtype):
    chosen_and_compared(Choosing([4, 2], [100, 33], dtype=dtype, weights=torch.float32), form)


@case(form=FORMS[:2], dtype=HALVES, mode=[0, 3], count=[8, 130])
def values(form, dtype, mode, count):
    choosing = Choosing([6, 3], [120, 9], dtype=dtype)
    arguments = choosing.arguments(form)
    chosen, best = choose(**arguments, sparse_count=count, sparse_mode=mode, return_value=True)
    assert best.dtype == dtype
    choosing.compare(form, chosen, best, mode)


@case(form=FORMS[2:], block=[16, 48, 1024], mode=[0, 3])
def block_sizes(form, block, mode):
    chosen_and_compared(Choosing([3, 1], [150, 17]), form, mode, block=block)


@case(form=FORMS, mode=[0, 3])
def rows_without_candidates(form, mode):
    """In mode 3 the first rows of a sequence with more rows than keys may choose none."""
    chosen_and_compared(Choosing([7, 2, 3], [4, 0, 30]), form, mode)


@case(count=[2048, 3072, 8192], form=FORMS[2:])
def many_keys(count, form):
    chosen_and_compared(Choosing([1, 2], [5000, 300], dtype=torch.bfloat16), form, count=count)


@case(dtype=HALVES, mode=[0, 3])
def whole_tensors_need_no_lengths(dtype, mode):
    choosing = Choosing([6] * 2, [50] * 2, dtype=dtype)
    arguments = choosing.arguments(FORMS[0])
    arguments = {name: value for name, value in arguments.items() if not name.startswith("actual")}
    chosen, _ = choose(**arguments, sparse_count=16, sparse_mode=mode)
    choosing.compare(FORMS[0], chosen, mode=mode)


@case(form=FORMS)
def views_of_wider_tensors(form):
    """The extension passes what it gets, with its strides."""
    choosing = Choosing([5, 3], [40, 12])
    arguments = choosing.arguments(form)
    for name in ("query", "weights"):
        arguments[name] = torch.cat([arguments[name]] * 2, 1)[:, : arguments[name].shape[1]]
    chosen, _ = choose(**arguments, sparse_count=16)
    choosing.compare(form, chosen)
