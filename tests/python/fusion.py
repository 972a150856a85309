"""Attention of training, `npu_fusion_attention` and its later versions: layouts, sparse modes, position bias."""

import torch

from harness import ON_950, case, close, exact, reaching
from reference import band, left_up, right_down, train
from tensors import Batch, ends, npu, separate, triangle

DENSE = ["BSH", "SBH", "BSND", "BNSD"]
HALVES = [torch.float16, torch.bfloat16]
# On Ascend 950 the extension has no third version, and the emulation neither FLOAT nor another layout of the statistics.
DTYPES = HALVES if ON_950 else [*HALVES, torch.float32]
FINEST = DTYPES[-1]
VERSIONS = [1, 2] if ON_950 else [1, 2, 3]
SOFTMAX_LAYOUTS = [""] if ON_950 else ["", "TND"]
# Largest scores and sums are FLOAT whatever the inputs are.
STATISTICS = (2e-4, 2e-4)
TOLERANCE = {torch.float16: (2e-3, 2e-3), torch.bfloat16: (1.6e-2, 1.6e-2), torch.float32: (1e-4, 1e-4)}



def operator(version, layout, softmax_layout="", sink=None, query_rope=None, **_):
    """The C operator that a version of the Python function is to launch."""
    if ON_950:
        return "aclnnFlashAttentionScoreV4"
    if sink is not None:
        return "aclnnFlashAttentionVarLenScoreV5" if layout == "TND" else "aclnnFlashAttentionScoreV3"
    if version == 2:
        rotary = "V3" if query_rope is not None else "V2"
        return f"aclnnFlashAttentionVarLenScore{rotary}" if layout == "TND" else "aclnnFlashAttentionScoreV2"
    if layout == "TND":
        return "aclnnFlashAttentionVarLenScore" + ("V4" if softmax_layout == "TND" else "")
    return "aclnnFlashAttentionScore"


def tokens(version, before, after):
    """The arguments of a band, which the first and the third version spell otherwise."""
    return {"pre_tokens": before, "next_tokens": after} if version == 2 else {"pre_tockens": before, "next_tockens": after}


def fusion(version, batch, layout, **arguments):
    """One call on the tensors of a batch."""
    if layout == "TND":
        lengths = {"actual_seq_qlen": ends(batch.rows), "actual_seq_kvlen": ends(batch.keys)}
        if version == 3:
            lengths = {name: torch.tensor(values) for name, values in lengths.items()}
        arguments = lengths | arguments
    arguments = batch.lay_out(layout) | {"scale": batch.scale} | arguments
    query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
    name = "npu_fusion_attention" + {1: "", 2: "_v2", 3: "_v3"}[version]
    arguments = {"head_num": batch.heads, "input_layout": layout} | arguments
    return reaching(name, operator(version, layout, **arguments), query, key, value, **arguments)


def statistics(tensor, layout, softmax_layout, rows, heads):
    """The largest scores or the sums of each sequence [N, S]; the eight copies of each must be the same."""
    tensor = tensor.cpu()
    exact(tensor, tensor[..., :1].expand(tensor.shape), "eight copies")
    tensor = tensor[..., 0]
    if layout != "TND":
        return list(tensor)
    if softmax_layout == "TND":
        return [part.transpose(0, 1) for part in tensor.split(list(rows))]
    # One sequence after the other, each by heads.
    parts = tensor.flatten().split([length * heads for length in rows])
    return [part.view(heads, length) for part, length in zip(parts, rows)]


def compare(batch, layout, result, softmax_layout="", visible=None, bias=None, kept=None, **reference):
    """`visible`, `bias` and `kept` are functions of a sequence's number."""
    output, largest, total = result[:3]
    outputs = separate(output, layout, batch.rows, batch.heads)
    largest = statistics(largest, layout, softmax_layout, batch.rows, batch.heads)
    total = statistics(total, layout, softmax_layout, batch.rows, batch.heads)
    for i in range(len(batch.rows)):
        query, key = batch.query[i], batch.key[i]
        if batch.query_rope:
            query = torch.cat([query, batch.query_rope[i]], -1)
            key = torch.cat([key, batch.key_rope[i]], -1)
        of = lambda function: None if function is None else function(i)
        expected = train(
            query, key, batch.value[i], batch.scale, of(visible), of(bias), kept=of(kept), **reference
        )
        close(outputs[i], expected[0], f"output of sequence {i}", TOLERANCE[output.dtype])
        close(largest[i], expected[1], f"largest scores of sequence {i}", STATISTICS)
        close(total[i], expected[2], f"sums of sequence {i}", STATISTICS)


def triangle_and_prefix():
    """The compressed mask of sparse mode 6."""
    square = torch.triu(torch.ones(2048, 2048, dtype=torch.bool), diagonal=1)
    halves = torch.zeros(1024, 2048, dtype=torch.bool)
    halves[:, 1024:] = True
    return torch.cat([square, halves]).npu()


@case(layout=DENSE, dtype=DTYPES, version=VERSIONS)
def dense_layouts(layout, dtype, version):
    batch = Batch([40] * 2, [65] * 2, dtype=dtype)
    compare(batch, layout, fusion(version, batch, layout))


# The second version hands the layout on beside a sink alone.
@case(
    dtype=DTYPES,
    way=[(version, layout) for version in VERSIONS for layout in SOFTMAX_LAYOUTS if version != 2 or not layout],
)
def packed_sequences(dtype, way):
    version, softmax_layout = way
    batch = Batch([33, 7, 20], [40, 65, 20], dtype=dtype)
    result = fusion(version, batch, "TND", softmax_layout=softmax_layout)
    compare(batch, "TND", result, softmax_layout)


@case(layout=DENSE + ["TND"], heads=[(4, 4), (6, 1), (8, 2)])
def groups_of_heads(layout, heads):
    batch = Batch([12] * 2, [31] * 2, *heads, dim=32)
    compare(batch, layout, fusion(1, batch, layout))


@case(
    dims=[(16, 16), (72, 72), (80, 40), (128, 128), (192, 128), (256, 256), (512, 512), (768, 768)],
    layout=["BNSD", "BSH", "TND"],
)
def head_sizes(dims, layout):
    batch = Batch([7] * 2, [19] * 2, dim=dims[0], value_dim=dims[1], dtype=torch.bfloat16)
    compare(batch, layout, fusion(1, batch, layout))


@case(layout=["BNSD", "BSND"])
def inputs_that_are_views(layout):
    batch = Batch([9] * 2, [17] * 2, dtype=FINEST)
    other = "BSND" if layout == "BNSD" else "BNSD"
    views = {name: tensor.transpose(1, 2) for name, tensor in batch.lay_out(other).items()}
    compare(batch, layout, fusion(1, batch, layout, **views))


@case(dtype=HALVES, version=VERSIONS)
def empty_sequences(dtype, version):
    batch = Batch([0, 4, 3], [5, 0, 9], dtype=dtype)
    compare(batch, "TND", fusion(version, batch, "TND"))


# Sparse modes of dense layouts: rows, keys, arguments, and what row and key of which sequence see each other.
DENSE_MODES = {
    "2": (30, 45, {}, lambda i: left_up(30, 45)),
    "2 of a square": (40, 40, {}, lambda i: left_up(40, 40)),
    "3": (30, 45, {}, lambda i: right_down(30, 45)),
    "3 of more rows than keys": (45, 30, {}, lambda i: right_down(45, 30)),
    "4": (30, 45, {"tokens": (8, 3)}, lambda i: band(30, 45, 8, 3)),
    "4 of a negative end": (30, 45, {"tokens": (20, -2)}, lambda i: band(30, 45, 20, -2)),
    "4 of a negative start": (45, 45, {"tokens": (-2, 9)}, lambda i: band(45, 45, -2, 9)),
    "6": (30, 45, {"prefix": [20, 45]}, lambda i: right_down(30, 45) | (torch.arange(45) < [20, 45][i])),
    "6 of more rows than keys": (
        45,
        30,
        {"prefix": [3, 30]},
        lambda i: right_down(45, 30) | (torch.arange(30) < [3, 30][i]),
    ),
}


@case(what=list(DENSE_MODES), layout=DENSE, version=VERSIONS)
def compressed_masks(what, layout, version):
    rows, keys, arguments, visible = DENSE_MODES[what]
    mode = int(what[0])
    batch = Batch([rows] * 2, [keys] * 2, dtype=torch.bfloat16)
    arguments = dict(arguments)
    if "tokens" in arguments:
        arguments |= tokens(version, *arguments.pop("tokens"))
    mask = triangle_and_prefix() if mode == 6 else triangle(torch.bool)
    result = fusion(version, batch, layout, sparse_mode=mode, atten_mask=mask, **arguments)
    compare(batch, layout, result, visible=visible)


MASK_SHAPES = ["Sq, Skv", "1, 1, Sq, Skv", "B, 1, Sq, Skv", "B, N, Sq, Skv"]


# Prefixes are those of the sequences, so that their masks are, too.
@case(
    form=[(mode, shape) for mode in [0, 1, 5] for shape in MASK_SHAPES if mode != 5 or shape.startswith("B")],
    mask=[torch.bool, torch.uint8],
    layout=DENSE,
    version=[1, 2],
)
def whole_masks(form, mask, layout, version):
    mode, shape = form
    rows, keys, prefix = 24, 40, [18, 30]
    batch = Batch([rows] * 2, [keys] * 2)
    sizes = {"B": 2, "N": batch.heads, "Sq": rows, "Skv": keys, "1": 1}
    hidden = torch.rand([sizes[name] for name in shape.split(", ")]) < 0.4
    if mode == 5:
        seen = torch.stack([right_down(rows, keys) | (torch.arange(keys) < length) for length in prefix])
        hidden = ~seen[:, None].expand(hidden.shape)
    else:
        hidden[..., 0] = False
    arguments = {"prefix": prefix} if mode == 5 else {}
    result = fusion(version, batch, layout, sparse_mode=mode, atten_mask=npu(hidden.to(mask)), **arguments)
    compare(batch, layout, result, visible=lambda i: ~hidden.expand(2, batch.heads, rows, keys)[i])


@case(window=[(2147483647, 0), (5, 3), (24, 40), (-1, 6), (9, -2)], version=VERSIONS)
def bands_beside_the_mask_that_says_the_same(window, version):
    batch = Batch([24] * 2, [40] * 2, dtype=FINEST)
    seen = band(24, 40, *window, origin=0)
    mask = npu(~seen)
    result = fusion(version, batch, "BNSD", sparse_mode=0, atten_mask=mask, inner_precise=2, **tokens(version, *window))
    compare(batch, "BNSD", result, visible=lambda i: seen)


@case(version=VERSIONS, mode=[0, 1, 2, 3, 4])
def modes_without_a_mask_hide_nothing(version, mode):
    batch = Batch([9] * 2, [12] * 2)
    compare(batch, "BSND", fusion(version, batch, "BSND", sparse_mode=mode, **tokens(version, 1, 1)))


@case(precise=[0, 2], mode=[0, 1])
def rows_that_see_nothing(precise, mode):
    batch = Batch([10] * 2, [20] * 2, dtype=FINEST)
    hidden = torch.rand(2, 1, 10, 20) < 0.5
    hidden[..., 0] = False
    hidden[:, :, 3] = True
    result = fusion(1, batch, "BNSD", sparse_mode=mode, atten_mask=npu(hidden), inner_precise=precise)
    compare(batch, "BNSD", result, visible=lambda i: ~hidden[i], corrected=precise == 2)


# Sparse modes of packed sequences: rows, keys, arguments, and what row and key of which sequence see each other.
PACKED_MODES = {
    "2": ([30, 12, 5], [45, 7, 5], {}, lambda i, r, k: left_up(r, k)),
    "3": ([30, 0, 12], [45, 5, 64], {}, lambda i, r, k: right_down(r, k)),
    "4": ([30, 12], [45, 64], {"tokens": (40, 2)}, lambda i, r, k: band(r, k, 40, 2)),
    "4 of a window": ([30, 12], [45, 64], {"tokens": (6, 0)}, lambda i, r, k: band(r, k, 6, 0)),
    "6": (
        [30, 12],
        [45, 64],
        {"prefix": [20, 60]},
        lambda i, r, k: right_down(r, k) | (torch.arange(k) < [20, 60][i]),
    ),
    "7": (
        [10, 12, 8],
        [10, 30, 20],
        {"tokens": (20, 0)},
        lambda i, r, k: band(r, k, 20, 0) if i == 2 else right_down(r, k),
    ),
    "7 of a piece from the middle": (
        [10, 8, 0],
        [10, 20, 4],
        {"tokens": (25, -5)},
        lambda i, r, k: band(r, k, 25, -5) if i == 1 else right_down(r, k),
    ),
    "8": (
        [8, 10, 12],
        [20, 10, 30],
        {"tokens": (20, 12)},
        lambda i, r, k: band(r, k, 20, 12) if i == 0 else left_up(r, k),
    ),
    "8 of the last rows": (
        [0, 8, 10],
        [3, 20, 10],
        {"tokens": (20, 0)},
        lambda i, r, k: band(r, k, 20, 0) if i == 1 else left_up(r, k),
    ),
}


@case(what=list(PACKED_MODES), dtype=DTYPES, version=VERSIONS)
def packed_compressed_masks(what, dtype, version):
    rows, keys, arguments, visible = PACKED_MODES[what]
    mode = int(what[0])
    batch = Batch(rows, keys, dtype=dtype)
    arguments = dict(arguments)
    if "tokens" in arguments:
        arguments |= tokens(version, *arguments.pop("tokens"))
    mask = triangle_and_prefix() if mode == 6 else triangle(torch.uint8)
    result = fusion(version, batch, "TND", sparse_mode=mode, atten_mask=mask, **arguments)
    seen = lambda i: visible(i, rows[i], keys[i])
    # Nothing corrects packed rows that see no key.
    compare(batch, "TND", result, visible=seen, corrected=False)


@case(mode=[0, 1], shape=["longest", "1, 1, longest", "sums"], version=VERSIONS)
def packed_whole_masks(mode, shape, version):
    batch = Batch([20, 12], [25, 40], dtype=FINEST)
    if shape == "sums":
        hidden = torch.rand(32, 65) < 0.4
        parts = [hidden[:20, :25], hidden[20:, 25:]]
    else:
        hidden = torch.rand(20, 40) < 0.4
        parts = [hidden[:20, :25], hidden[:12, :40]]
    for part in parts:
        part[:, 0] = False
    mask = npu(hidden[None, None] if shape.startswith("1") else hidden)
    result = fusion(version, batch, "TND", sparse_mode=mode, atten_mask=mask)
    compare(batch, "TND", result, visible=lambda i: ~parts[i])


def distance(rows, keys, query_start=0, key_start=0):
    """How far apart the positions of a row and a key are."""
    return ((torch.arange(keys) + key_start) - (torch.arange(rows)[:, None] + query_start)).abs().double()


@case(kind=[0, 1], shape=["B, N, Sq, Skv", "1, N, Sq, Skv", "B, N, 1, Skv"], layout=DENSE, dtype=DTYPES)
def position_bias(kind, shape, layout, dtype):
    rows, keys = 24, 40
    batch = Batch([rows] * 2, [keys] * 2, dtype=dtype)
    sizes = {"B": 2, "N": batch.heads, "Sq": rows, "Skv": keys, "1": 1}
    bias = torch.randn([sizes[name] for name in shape.split(", ")]).to(dtype)
    result = fusion(2, batch, layout, pse=npu(bias), pse_type=kind)
    whole = bias.double().expand(2, batch.heads, rows, keys)
    compare(batch, layout, result, bias=lambda i: whole[i] * (batch.scale if kind == 1 else 1))


@case(layout=DENSE, dtype=HALVES, version=VERSIONS[::2])
def position_bias_before_the_scale(layout, dtype, version):
    batch = Batch([16] * 2, [32] * 2, dtype=dtype)
    bias = torch.randn(2, 4, 16, 32).to(dtype)
    result = fusion(version, batch, layout, pse=npu(bias))
    compare(batch, layout, result, bias=lambda i: bias[i].double() * batch.scale)


@case(layout=["BNSD", "SBH"], batches=[1, 2])
def position_bias_of_the_last_1024_rows(layout, batches):
    """A bias that depends on the distance alone, of which only the last rows are given."""
    length = 1100
    batch = Batch([length] * 2, [length] * 2, heads=2, kv_heads=1, dim=16)
    slopes = torch.rand(batches, 2, 1, 1)
    bias = (-slopes * distance(length, length)).half()
    result = fusion(
        1, batch, layout, pse=npu(bias[:, :, -1024:]), sparse_mode=2, atten_mask=triangle(torch.bool)
    )
    rows = torch.arange(length)
    back = (rows[:, None] - rows[None, :]).clamp(min=0)
    # The value at a distance is the one that the last row has there.
    known = bias[:, :, -1].flip(-1).double()
    whole = known[:, :, back].expand(2, 2, length, length)
    compare(batch, layout, result, visible=lambda i: left_up(length, length), bias=lambda i: whole[i] * batch.scale)


@case(kind=[0, 1], of_rows=[True, False], dtype=HALVES)
def packed_position_bias(kind, of_rows, dtype):
    batch = Batch([20, 12], [25, 40], dtype=dtype)
    parts = [
        torch.randn(batch.heads, rows if of_rows else 1, keys).to(dtype) for rows, keys in zip(batch.rows, batch.keys)
    ]
    bias = torch.cat([part.flatten() for part in parts])
    result = fusion(2, batch, "TND", pse=npu(bias), pse_type=kind)
    compare(batch, "TND", result, bias=lambda i: parts[i].double() * (batch.scale if kind == 1 else 1))


@case(kind=[2, 3], shape=["N", "B, N"], start=[None, (7, 3), (0, 30)], layout=DENSE)
def slopes(kind, shape, start, layout):
    batch = Batch([32] * 2, [32] * 2, dtype=torch.bfloat16)
    slopes = torch.rand(2, batch.heads) if shape == "B, N" else torch.rand(batch.heads)
    starts = {} if start is None else {"q_start_idx": [start[0]], "kv_start_idx": [start[1]]}
    result = fusion(2, batch, layout, pse=npu(slopes), pse_type=kind, **starts)
    apart = distance(32, 32, *(start or (0, 0)))
    apart = apart.sqrt() if kind == 3 else apart
    of = lambda i: (slopes[i] if shape == "B, N" else slopes).double()[:, None, None]
    compare(batch, layout, result, bias=lambda i: -of(i) * apart)


@case(kind=[2, 3], start=[None, (7, 3)], dtype=DTYPES)
def packed_slopes(kind, start, dtype):
    batch = Batch([20, 12], [20, 12], dtype=dtype)
    slopes = torch.rand(batch.heads)
    starts = {} if start is None else {"q_start_idx": [start[0]], "kv_start_idx": [start[1]]}
    result = fusion(2, batch, "TND", pse=npu(slopes), pse_type=kind, **starts)

    def bias(i):
        apart = distance(batch.rows[i], batch.keys[i], *(start or (0, 0)))
        return -slopes.double()[:, None, None] * (apart.sqrt() if kind == 3 else apart)

    compare(batch, "TND", result, bias=bias)
