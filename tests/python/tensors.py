"""Batches of sequences, and how layouts and caches lay them out."""

import torch

# What stands where no result may depend on it.
JUNK = 33.0
# Block size of caches, unless a case chooses.
BLOCK = 128


def npu(tensor):
    return None if tensor is None else tensor.contiguous().npu()


class Batch:
    """Sequences of random tensors: lists of query [N, rows, D], key [Nk, keys, D] and value [Nk, keys, Dv]."""

    def __init__(self, rows, keys, heads=4, kv_heads=2, dim=64, value_dim=None, dtype=torch.float16, rope=0):
        self.rows, self.keys = list(rows), list(keys)
        self.heads, self.kv_heads, self.dim, self.dtype = heads, kv_heads, dim, dtype
        self.value_dim = value_dim or dim
        self.scale = (dim + rope) ** -0.5

        def sequences(heads, lengths, dim):
            return [torch.randn(heads, length, dim).to(dtype) for length in lengths]

        self.query = sequences(heads, self.rows, dim)
        self.key = sequences(kv_heads, self.keys, dim)
        self.value = sequences(kv_heads, self.keys, self.value_dim)
        self.query_rope = sequences(heads, self.rows, rope) if rope else None
        self.key_rope = sequences(kv_heads, self.keys, rope) if rope else None

    def expected(self, attend, visible=None, bias=None, sink=None, scale=None):
        """The reference's outputs and log-sums of all sequences; `visible` and `bias` are functions of a sequence's number."""
        outputs, sums = [], []
        for i in range(len(self.rows)):
            query, key = self.query[i], self.key[i]
            if self.query_rope:
                query = torch.cat([query, self.query_rope[i]], -1)
                key = torch.cat([key, self.key_rope[i]], -1)
            seen = None if visible is None else visible(i)
            added = None if bias is None else bias(i)
            output, lse = attend(query, key, self.value[i], scale or self.scale, seen, added, sink)
            outputs.append(output)
            sums.append(lse)
        return outputs, sums

    def lay_out(self, layout):
        """Query, key and value, and the rotary parts if there are any, as arguments of a call."""
        form = layout.split("_")[0]
        tensors = {"query": arrange(self.query, form), "key": arrange(self.key, form), "value": arrange(self.value, form)}
        if self.query_rope:
            tensors["query_rope"] = arrange(self.query_rope, form)
            tensors["key_rope"] = arrange(self.key_rope, form)
        return {name: npu(tensor) for name, tensor in tensors.items()}

    def lengths(self, layout, paged=False):
        """Both arrays of lengths: ends of packed sequences, else one length a sequence."""
        if not packed(layout):
            return {"actual_seq_lengths": self.rows, "actual_seq_lengths_kv": self.keys}
        keys = self.keys if paged else ends(self.keys)
        return {"actual_seq_lengths": ends(self.rows), "actual_seq_lengths_kv": keys}

    def heads_and_scale(self):
        return {"num_heads": self.heads, "num_key_value_heads": self.kv_heads, "scale": self.scale}

    def page(self, form, block=BLOCK, spare=3):
        """Caches of key and value, and of the rotary keys if there are any, with one block table."""
        order = shuffled_blocks(self.keys, block, spare)
        tensors = {
            "key": cache(self.key, order, form, block),
            "value": cache(self.value, order, form, block),
            "block_table": table(order),
        }
        if self.key_rope:
            tensors["key_rope"] = cache(self.key_rope, order, form, block)
        return {name: npu(tensor) for name, tensor in tensors.items()} | {"block_size": block}


def ends(lengths):
    total, result = 0, []
    for length in lengths:
        total += length
        result.append(total)
    return result


def packed(layout):
    return layout.startswith(("TND", "NTD"))


def lengths_on_device(lengths, form):
    """Lengths as operators of sparse attention read them: ends of packed sequences, else one length a sequence."""
    return npu(torch.tensor(ends(lengths) if packed(form) else lengths, dtype=torch.int32))


def stored(tensors, lengths, form, block=BLOCK):
    """Sequences with one head by the names of their arguments, laid out, or for PA_BSND in caches with a block table."""
    if form != "PA_BSND":
        return {name: npu(arrange(sequences, form)) for name, sequences in tensors.items()}
    order = shuffled_blocks(lengths, block, 2)
    caches = {name: npu(cache(sequences, order, "BnBsH", block)[:, :, None]) for name, sequences in tensors.items()}
    return caches | {"block_table": npu(table(order))}


def arrange(sequences, form):
    """Sequences [N, S, D] as one tensor; padding is junk."""
    if form == "TND":
        return torch.cat(sequences, 1).transpose(0, 1).contiguous()
    if form == "NTD":
        return torch.cat(sequences, 1)
    longest = max(s.shape[1] for s in sequences)
    heads, _, dim = sequences[0].shape
    padded = torch.full((len(sequences), heads, longest, dim), JUNK).to(sequences[0].dtype)
    for row, sequence in zip(padded, sequences):
        row[:, : sequence.shape[1]] = sequence
    if form == "BNSD":
        return padded
    if form == "NBSD":
        return padded.transpose(0, 1).contiguous()
    rows_first = padded.transpose(1, 2).contiguous()
    if form == "SBH":
        return rows_first.flatten(2).transpose(0, 1).contiguous()
    return rows_first if form == "BSND" else rows_first.flatten(2)


def separate(tensor, layout, rows, heads):
    """The sequences [N, S, D] of an output, on the host."""
    tensor = tensor.cpu()
    form = layout.split("_")[-1]
    if form in ("TND", "NTD"):
        tensor = tensor.transpose(0, 1) if form == "TND" else tensor
        return list(tensor.split(list(rows), dim=1))
    if form == "SBH":
        tensor = tensor.transpose(0, 1)
    if form in ("BSH", "SBH"):
        tensor = tensor.unflatten(2, (heads, -1))
    if form in ("BSH", "SBH", "BSND"):
        tensor = tensor.transpose(1, 2)
    if form == "NBSD":
        tensor = tensor.transpose(0, 1)
    return [sequence[:, :length] for sequence, length in zip(tensor, rows)]


def separate_sums(lse, layout, rows):
    """The log-sums [N, S] of each sequence, on the host."""
    lse = lse.cpu()
    if packed(layout):
        return [s.squeeze(-1).transpose(0, 1) for s in lse.split(list(rows), dim=0)]
    return [s.squeeze(-1)[:, :length] for s, length in zip(lse, rows)]


def shuffled_blocks(lengths, block, spare):
    """The numbers of the blocks of each sequence, in no order, of a pool with some more."""
    counts = [-(-length // block) for length in lengths]
    numbers = torch.randperm(sum(counts) + spare).tolist()
    order, at = [], 0
    for count in counts:
        order.append(numbers[at : at + count])
        at += count
    return order, len(numbers)


def table(order):
    """A block table with a spare column."""
    order, _ = order
    width = max(len(blocks) for blocks in order) + 1
    return torch.tensor([blocks + [0] * (width - len(blocks)) for blocks in order], dtype=torch.int32)


def cache(sequences, order, form, block):
    """Sequences [Nk, S, D] in blocks: BnBsH [n, block, Nk * D], BnNBsD [n, Nk, block, D], NZ [n, Nk, D / c, block, c]."""
    order, count = order
    heads, _, dim = sequences[0].shape
    dtype = sequences[0].dtype
    pool = torch.full((count, heads, block, dim), JUNK).to(dtype)
    for sequence, blocks in zip(sequences, order):
        for position, number in enumerate(blocks):
            part = sequence[:, position * block : (position + 1) * block]
            pool[number, :, : part.shape[1]] = part
    if form == "BnNBsD":
        return pool
    if form == "BnBsH":
        return pool.transpose(1, 2).flatten(2).contiguous()
    lane = 32 // pool.element_size()
    return pool.unflatten(-1, (dim // lane, lane)).transpose(2, 3).contiguous()


def triangle(dtype=torch.int8, rank=2):
    """The compressed mask of sparse modes 2, 3 and 4."""
    mask = torch.triu(torch.ones(2048, 2048), diagonal=1).to(dtype)
    return mask.view(*[1] * (rank - 2), 2048, 2048).npu()
