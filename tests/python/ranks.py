"""`torch.distributed` with its backend `hccl`: a process for each rank, started by torchrun.

Run by torchrun with the name of a program, this file is one rank of it.
"""

import os
import signal
import subprocess
import sys

import torch
import torch_npu
import torch.distributed as dist

from harness import case, close, counted, exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64]


def started(program, ranks, **variables):
    """Runs a program of this file as so many ranks; how it ended, and what it has said."""
    ended = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__, program],
        env=os.environ | {"ASCEND_EMU_DEVICES": str(ranks), "OMP_NUM_THREADS": "1"} | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    return ended.returncode, ended.stdout


def succeeds(program, ranks, **variables):
    code, output = started(program, ranks, **variables)
    assert code == 0, output[-4000:]
    findings = [line for line in output.splitlines() if "ascend-emu:" in line and ".deprecated: " not in line]
    assert not findings, findings
    for rank in range(ranks):
        assert f"rank {rank} is done with {program}" in output, output[-4000:]
    counted(f"torch.distributed of {ranks} ranks")


@case(ranks=[2, 4])
def every_collective(ranks):
    succeeds("collectives", ranks)


@case(ranks=[4])
def groups_of_some_ranks(ranks):
    succeeds("groups", ranks)


@case(ranks=[2])
def heads_and_contexts_divided(ranks):
    succeeds("attention", ranks)


@case(ranks=[2])
def ranks_that_gather_different_counts_are_both_told(ranks):
    _, output = started("differing", ranks)
    for rank in range(ranks):
        # The extension's watchdog may ask the communicator before the rank waits.
        told = (f"rank {rank} is told: ", f"[Rank {rank}] checkHcclComms found")
        assert any(text in output for text in told), output[-4000:]


@case(ranks=[2])
def a_rank_that_is_killed_is_named(ranks):
    code, output = started("killed", ranks)
    assert code != 0
    assert "rank 0 is told: " in output, output[-4000:]


def values(rank, count, dtype):
    """What a rank has: small whole numbers, whose sums every type holds."""
    return ((torch.arange(count) * 7 + 3 * rank) % 11 - 5).to(dtype)


def collectives(rank, size):
    for dtype in DTYPES:
        for count in [1, 37, 4096]:
            own = values(rank, count, dtype)
            all_ranks = [values(other, count, dtype) for other in range(size)]
            total = torch.stack(all_ranks).sum(0).to(dtype)

            gathered = torch.empty(size * count, dtype=dtype).npu()
            dist.all_gather_into_tensor(gathered, own.npu())
            exact(gathered, torch.cat(all_ranks), "all_gather_into_tensor")
            parts = [torch.empty(count, dtype=dtype).npu() for _ in range(size)]
            dist.all_gather(parts, own.npu())
            for part, expected in zip(parts, all_ranks):
                exact(part, expected, "all_gather")

            for op, expected in [
                (dist.ReduceOp.SUM, total),
                (dist.ReduceOp.MAX, torch.stack(all_ranks).amax(0)),
                (dist.ReduceOp.MIN, torch.stack(all_ranks).amin(0)),
            ]:
                reduced = own.npu()
                dist.all_reduce(reduced, op=op)
                exact(reduced, expected, f"all_reduce {op}")

            wide = [values(other, size * count, dtype) for other in range(size)]
            part = torch.empty(count, dtype=dtype).npu()
            dist.reduce_scatter_tensor(part, wide[rank].npu())
            exact(part, torch.stack(wide).sum(0).to(dtype)[rank * count :][:count], "reduce_scatter_tensor")

            exchanged = torch.empty(size * count, dtype=dtype).npu()
            dist.all_to_all_single(exchanged, wide[rank].npu())
            exact(exchanged, torch.cat([other[rank * count :][:count] for other in wide]), "all_to_all_single")
            # Rank i sends i + j elements to rank j.
            sent, received = [rank + j for j in range(size)], [i + rank for i in range(size)]
            uneven = torch.empty(sum(received), dtype=dtype).npu()
            source = values(rank, sum(sent), dtype)
            dist.all_to_all_single(uneven, source.npu(), received, sent)
            expected = [values(i, sum(i + j for j in range(size)), dtype) for i in range(size)]
            starts = [sum(i + j for j in range(rank)) for i in range(size)]
            expected = torch.cat([one[start:][: i + rank] for i, (one, start) in enumerate(zip(expected, starts))])
            exact(uneven, expected, "all_to_all_single of uneven parts")

            copied = own.npu()
            dist.broadcast(copied, src=size - 1)
            exact(copied, all_ranks[-1], "broadcast")

            incoming = torch.empty(count, dtype=dtype).npu()
            operations = [
                dist.P2POp(dist.isend, own.npu(), (rank + 1) % size),
                dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            exact(incoming, all_ranks[rank - 1], "batch_isend_irecv")
    # Others than these are a byte an element.
    flags = torch.tensor([rank % 2 == 0, True]).npu()
    gathered = torch.empty(2 * size, dtype=torch.bool).npu()
    dist.all_gather_into_tensor(gathered, flags)
    exact(gathered, torch.tensor([flag for other in range(size) for flag in (other % 2 == 0, True)]), "flags")
    # Work that the host does not wait for.
    tensor = torch.ones(1000).npu()
    works = [dist.all_reduce(tensor, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()
    exact(tensor, torch.full([1000], float(size**5)))


def groups(rank, size):
    """Two groups, and one of the first ranks of both."""
    halves = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    tensor = torch.tensor([1 << rank]).npu()
    dist.all_reduce(tensor, group=halves[rank % 2])
    assert tensor.item() == (0b0101 if rank % 2 == 0 else 0b1010), tensor.item()
    firsts = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(tensor, group=firsts)
        assert tensor.item() == 0b1111, tensor.item()
    # One rank sends to another, and waits for what comes back.
    ball = torch.full([5], float(rank)).npu()
    if rank == 3:
        dist.send(ball, dst=0)
        dist.recv(ball, src=0)
    elif rank == 0:
        dist.recv(ball, src=3)
        dist.send(ball * 2, dst=3)
    if rank in (0, 3):
        assert ball.tolist() == ([3.0] * 5 if rank == 0 else [6.0] * 5), ball
    dist.barrier()


def attention(rank, size):
    """Twelve heads divided over the ranks, then a context; each is the attention of one device."""
    heads, rows, keys, dim = 12, 3, 40, 64
    query, key, value = (torch.randn(1, heads, length, dim).half() for length in (rows, keys, keys))
    scale = dim**-0.5
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(), key.double(), value.double(), scale=scale
    )
    own = heads // size
    part = slice(rank * own, (rank + 1) * own)
    output, _ = torch_npu.npu_fused_infer_attention_score(
        query[:, part].contiguous().npu(),
        key[:, part].contiguous().npu(),
        value[:, part].contiguous().npu(),
        num_heads=own,
        num_key_value_heads=own,
        input_layout="BNSD",
        scale=scale,
    )
    gathered = torch.empty(size, *output.shape, dtype=output.dtype).npu()
    dist.all_gather_into_tensor(gathered, output)
    close(torch.cat(list(gathered.cpu()), dim=1), expected, "heads")

    # The keys of the context go round; the owner of the newest one counts it, whichever that is.
    for length in range(keys - size, keys + 1):
        expected = torch.nn.functional.scaled_dot_product_attention(
            query[:, :, :1].double(), key[:, :, :length].double(), value[:, :, :length].double(), scale=scale
        )
        own_keys, own_values = (tensor[:, :, rank:length:size].contiguous() for tensor in (key, value))
        output, lse = torch_npu.npu_fused_infer_attention_score(
            query[:, :, :1].contiguous().npu(),
            own_keys.npu(),
            own_values.npu(),
            num_heads=heads,
            num_key_value_heads=heads,
            input_layout="BNSD",
            scale=scale,
            softmax_lse_flag=True,
        )
        # Every rank gets its heads of all ranks: outputs and log-sum-exps side by side, in single precision.
        sent = torch.cat([output.float(), lse.reshape(1, heads, 1, 1)], dim=-1).reshape(heads, dim + 1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        received = received.reshape(size, heads // size, dim + 1).cpu().double()
        weights = torch.softmax(received[..., dim], dim=0)
        merged = (received[..., :dim] * weights[..., None]).sum(0)
        close(merged.half(), expected[0, part, 0], f"{length} keys")


def told(rank, call):
    """Says what a rank is told of a call that cannot end well."""
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError as error:
        print(f"rank {rank} is told: {error}", flush=True)
        os._exit(0)
    raise AssertionError("the call was taken")


def differing(rank, size):
    dist.all_reduce(torch.ones(3).npu())
    count = 4 + rank
    own, gathered = torch.ones(count).npu(), torch.empty(size * count).npu()
    told(rank, lambda: dist.all_gather_into_tensor(gathered, own))


def killed(rank, size):
    # torchrun ends the ranks that are left as soon as one is gone, on a busy machine before they are told. Once the
    # first sum is there both ranks ignore it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tensor = torch.ones(3).npu()
    dist.all_reduce(tensor)
    torch.npu.synchronize()
    if rank == 1:
        os.abort()
    told(rank, lambda: dist.all_reduce(tensor))


def main(program):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.npu.set_device(rank)
    torch.manual_seed(1)
    dist.init_process_group("hccl")
    program(rank, size)
    dist.barrier()
    torch.npu.synchronize()
    dist.destroy_process_group()
    print(f"rank {rank} is done with {program.__name__}", flush=True)


if __name__ == "__main__":
    main({f.__name__: f for f in (collectives, groups, attention, differing, killed)}[sys.argv[1]])
