//! What attention divided over ranks costs on paper: time and memory of one layer, by bytes, operations and hops.
//!
//! Elements have two bytes. A rank computes as long as the slower of its operations and its reads of memory takes; an
//! exchange takes a latency and the time of the slowest link, on which every rank sends its share at once. Exchanges
//! are behind or before attention; only a ring overlaps the two.

/// Bytes of an element.
const ELEMENT: f64 = 2.0;

/// Bytes of a log-sum-exp.
const LSE: f64 = 4.0;

/// Devices and their links, in bytes, operations and seconds. Speeds are what remains of the published ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    pub(crate) name: &'static str,
    /// Bytes of device memory that a rank reads in a second.
    memory: f64,
    /// Operations of half precision in a second.
    compute: f64,
    /// The ranks within one group of fast links.
    group: usize,
    /// Bytes that a rank sends in a second to all ranks of its group together.
    inner: f64,
    /// Bytes that a rank sends in a second to one rank of its group.
    neighbour: f64,
    /// Bytes that a rank sends in a second out of its group.
    outer: f64,
    /// Seconds until the first byte of an exchange arrives: within a group, and between groups.
    latencies: [f64; 2],
}

/// The share of published speeds that programs reach: of memory, of operations, of links.
const REACHED: [f64; 3] = [0.7, 0.5, 0.8];

const fn machine(name: &'static str, group: usize, inner: f64, neighbour: f64) -> Machine {
    let [memory, compute, links] = REACHED;
    Machine {
        name,
        memory: 1.6e12 * memory,
        compute: 3.5e14 * compute,
        group,
        inner: inner * links,
        neighbour: neighbour * links,
        outer: 2.5e10 * links,
        latencies: [1e-5, 3e-5],
    }
}

/// The machines of the table.
pub(crate) const MACHINES: [Machine; 2] = [
    // Each rank has a link to each of seven others.
    machine("Atlas A2, 8 NPUs a server", 8, 1.96e11, 2.8e10),
    // A rank is a die, of which an NPU has two; switches give any pair of ranks all of a rank's links.
    machine("CloudMatrix384, 768 dies", 768, 1.96e11, 1.96e11),
];

/// Attention of one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layer {
    pub(crate) requests: usize,
    /// Keys of each request.
    pub(crate) tokens: usize,
    /// Query rows of each request in a step.
    pub(crate) rows: usize,
    /// Query heads, of all ranks.
    pub(crate) heads: usize,
    /// Key heads, of all ranks.
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// The seconds of one layer on each rank, and the bytes of keys and values that the rank keeps.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Cost {
    /// Exchanges before attention.
    pub(crate) gather: f64,
    pub(crate) attention: f64,
    /// Exchanges behind attention, or the part of a ring's that attention does not hide.
    pub(crate) exchange: f64,
    pub(crate) memory: f64,
}

impl Cost {
    pub(crate) fn seconds(&self) -> f64 {
        self.gather + self.attention + self.exchange
    }
}

impl Machine {
    /// The time in which a rank computes.
    fn computes(&self, operations: f64, bytes: f64) -> f64 {
        (operations / self.compute).max(bytes / self.memory)
    }

    fn latency(&self, ranks: usize) -> f64 {
        match ranks {
            0 | 1 => 0.0,
            ranks => self.latencies[usize::from(ranks > self.group)],
        }
    }

    /// The seconds until every rank of a group has sent its bytes to each of this number of others.
    fn spreads(&self, others: usize, bytes_each: f64) -> f64 {
        let one = if others > 0 { bytes_each / self.neighbour } else { 0.0 };
        one.max(others as f64 * bytes_each / self.inner)
    }

    /// The time in which every rank sends other bytes to each of the others.
    fn exchanges(&self, ranks: usize, bytes_each: f64) -> f64 {
        let near = ranks.min(self.group).saturating_sub(1);
        let far = ranks.saturating_sub(1 + near);
        self.latency(ranks) + self.spreads(near, bytes_each).max(far as f64 * bytes_each / self.outer)
    }

    /// The time in which every rank sends the same bytes to each of the others: first from group to group, each rank
    /// to its counterparts, then what has come within the group.
    fn gathers(&self, ranks: usize, bytes: f64) -> f64 {
        let groups = ranks.div_ceil(self.group);
        let near = ranks.min(self.group).saturating_sub(1);
        let within = if near > 0 { self.latencies[0] + self.spreads(near, groups as f64 * bytes) } else { 0.0 };
        let between = if groups > 1 { self.latencies[1] + (groups - 1) as f64 * bytes / self.outer } else { 0.0 };
        within + between
    }

    /// The time in which every rank sends bytes to the next one.
    fn passes_on(&self, ranks: usize, bytes: f64) -> f64 {
        self.latency(ranks) + bytes / if ranks > self.group { self.outer } else { self.neighbour }
    }
}

impl Layer {
    /// Bytes of keys and values of a request.
    fn keys(&self, tokens: f64, kv_heads: usize) -> f64 {
        2.0 * tokens * (kv_heads * self.head_dim) as f64 * ELEMENT
    }

    fn all_rows(&self) -> f64 {
        self.requests as f64 * self.rows as f64
    }

    /// Heads of a rank: those of all, divided, and at least one.
    fn part(heads: usize, ranks: usize) -> usize {
        heads.div_ceil(ranks.max(1))
    }

    /// Decoding with contexts divided over `ranks` ranks, each of which has its own query heads of the same key heads.
    fn over_contexts(&self, machine: &Machine, ranks: usize, heads: usize, kv_heads: usize) -> Cost {
        let share = self.tokens as f64 / ranks as f64;
        let memory = self.requests as f64 * self.keys(share, kv_heads);
        let all_heads = heads as f64 * ranks as f64 * self.head_dim as f64;
        let operations = 4.0 * self.all_rows() * share * all_heads;
        let numbers = self.all_rows() * (heads * self.head_dim) as f64 * ELEMENT;
        let lse = self.all_rows() * heads as f64 * LSE;
        // A merge reads what has come.
        let merge = if ranks > 1 { (numbers + lse) * ranks as f64 / machine.memory } else { 0.0 };
        Cost {
            gather: machine.gathers(ranks, numbers),
            attention: machine.computes(operations, memory),
            exchange: machine.exchanges(ranks, numbers) + machine.exchanges(ranks, lse) + merge,
            memory,
        }
    }

    /// The layer with its heads and nothing else divided: ranks beyond the key heads have copies of keys.
    pub(crate) fn decode_by_heads(&self, machine: &Machine, ranks: usize) -> Cost {
        self.over_contexts(machine, 1, Self::part(self.heads, ranks), Self::part(self.kv_heads, ranks))
    }

    /// Heads divided, and contexts over those ranks that would have copies of the same keys.
    pub(crate) fn decode_by_contexts(&self, machine: &Machine, ranks: usize) -> Cost {
        let copies = (ranks / self.kv_heads.max(1)).max(1);
        self.over_contexts(machine, copies, Self::part(self.heads, ranks), Self::part(self.kv_heads, ranks))
    }

    /// The batch of `ascend-attn ranks`: contexts divided over all ranks, which have these heads each, or its new rows.
    pub(crate) fn of_each_rank(&self, machine: &Machine, ranks: usize, by_rows: bool) -> Cost {
        match by_rows {
            true => self.over_rows(machine, ranks, self.heads * ranks, [self.tokens, self.rows]),
            false => self.over_contexts(machine, ranks, self.heads, self.kv_heads),
        }
    }

    /// The new rows of requests divided over ranks, behind cached ones: the keys of all ranks are gathered first.
    fn over_rows(&self, machine: &Machine, ranks: usize, heads: usize, [cached, new]: [usize; 2]) -> Cost {
        let (requests, all_heads) = (self.requests as f64, (heads * self.head_dim) as f64);
        let memory = requests * self.keys((cached + new) as f64, self.kv_heads);
        // On the average a row sees half of the new ones.
        let operations = 4.0 * requests * new as f64 * (cached as f64 + new as f64 / 2.0) * all_heads;
        Cost {
            gather: machine.gathers(ranks, memory / ranks as f64),
            attention: machine.computes(operations / ranks as f64, memory),
            exchange: 0.0,
            memory,
        }
    }

    /// Operations of causal attention of whole prompts.
    fn prompt_operations(&self, heads: usize) -> f64 {
        let tokens = self.tokens as f64;
        2.0 * self.requests as f64 * tokens * tokens * (heads * self.head_dim) as f64
    }

    /// A prompt with its heads divided; the outputs are summed over the ranks (all-reduce of the hidden states).
    pub(crate) fn prompt_by_heads(&self, machine: &Machine, ranks: usize) -> Cost {
        let (heads, kv_heads) = (Self::part(self.heads, ranks), Self::part(self.kv_heads, ranks));
        let memory = self.requests as f64 * self.keys(self.tokens as f64, kv_heads);
        let hidden = self.requests as f64 * self.tokens as f64 * (self.heads * self.head_dim) as f64 * ELEMENT;
        Cost {
            gather: 0.0,
            attention: machine.computes(self.prompt_operations(heads), memory),
            // Every rank gets its part of the sum, then the parts of the others.
            exchange: 2.0 * machine.gathers(ranks, hidden / ranks as f64),
            memory,
        }
    }

    /// A prompt with its rows divided (PCP).
    pub(crate) fn prompt_by_rows(&self, machine: &Machine, ranks: usize) -> Cost {
        self.over_rows(machine, ranks, self.heads, [0, self.tokens])
    }

    /// A prompt with its rows and keys divided, whose keys go round while attention is computed.
    pub(crate) fn prompt_by_ring(&self, machine: &Machine, ranks: usize) -> Cost {
        let keys = self.requests as f64 * self.keys(self.tokens as f64 / ranks as f64, self.kv_heads);
        let operations = self.prompt_operations(self.heads) / (ranks as f64 * ranks as f64);
        let step = machine.computes(operations, keys);
        let passes = machine.passes_on(ranks, keys);
        Cost {
            gather: 0.0,
            attention: step * ranks as f64,
            exchange: (passes - step).max(0.0) * (ranks - 1) as f64,
            // Its own keys, those that it works on, and those that arrive.
            memory: keys * ranks.min(3) as f64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYER: Layer = Layer { requests: 4, tokens: 1 << 16, rows: 1, heads: 64, kv_heads: 8, head_dim: 128 };

    fn close(one: f64, two: f64) -> bool {
        (one - two).abs() <= 1e-9 * two.abs()
    }

    #[test]
    fn one_rank_exchanges_nothing_and_every_division_is_the_whole() {
        for machine in &MACHINES {
            let [heads, contexts] = [LAYER.decode_by_heads(machine, 1), LAYER.decode_by_contexts(machine, 1)];
            assert_eq!(heads, contexts);
            let prompts =
                [LAYER.prompt_by_heads(machine, 1), LAYER.prompt_by_rows(machine, 1), LAYER.prompt_by_ring(machine, 1)];
            for cost in prompts {
                assert_eq!((cost.gather, cost.exchange, cost.memory), (0.0, 0.0, heads.memory));
                assert!(close(cost.attention, prompts[0].attention), "{cost:?}");
            }
        }
    }

    #[test]
    fn keys_are_halved_by_heads_up_to_the_key_heads_and_by_contexts_beyond() {
        let machine = &MACHINES[1];
        for ranks in [2, 4, 8] {
            assert_eq!(LAYER.decode_by_heads(machine, ranks), LAYER.decode_by_contexts(machine, ranks));
        }
        let [eight, more] = [8, 64].map(|ranks| LAYER.decode_by_heads(machine, ranks).memory);
        assert!(close(eight, more));
        assert!(close(LAYER.decode_by_contexts(machine, 64).memory, eight / 8.0));
        // Bytes by hand: 2 tensors of 4 requests with 65536 rows of one key head.
        assert!(close(eight, 2.0 * 4.0 * 65536.0 * 128.0 * 2.0));
    }

    #[test]
    fn an_exchange_takes_as_long_as_its_slowest_link() {
        let machine = &MACHINES[0];
        // One of seven links within a server.
        assert!(close(machine.exchanges(2, 2.24e9), 1e-5 + 0.1));
        assert!(close(machine.exchanges(8, 2.24e9), 1e-5 + 0.1));
        // Eight ranks of the other server through one port.
        assert!(close(machine.exchanges(16, 1e8), 3e-5 + 8.0 * 1e8 / 2e10));
        // One rank of the other server through a port, and the bytes of both servers over each link of its own.
        assert!(close(machine.gathers(16, 2.24e9), 4e-5 + 2.24e9 / 2e10 + 0.2));
        assert!(close(machine.gathers(8, 2.24e9), machine.exchanges(8, 2.24e9)));
        assert!(close(machine.passes_on(8, 2.24e9), 1e-5 + 0.1));
        assert!(close(machine.passes_on(9, 2e9), 3e-5 + 0.1));
        assert_eq!([machine.exchanges(1, 1e9), machine.gathers(1, 1e9)], [0.0; 2]);
    }

    #[test]
    fn a_ring_of_long_prompts_hides_its_messages_and_one_of_short_ones_does_not() {
        let machine = &MACHINES[0];
        let long = Layer { requests: 1, tokens: 1 << 20, ..LAYER };
        assert_eq!(long.prompt_by_ring(machine, 8).exchange, 0.0);
        assert!(Layer { tokens: 1 << 10, ..long }.prompt_by_ring(machine, 8).exchange > 0.0);
    }
}
