//! Random calls of FlashAttentionScore, with data.

use super::calls::Random;
use ascend_spec::ops::flash_attention_score::{Arguments, FlashAttentionCall, InputLayout, Parameter, Version, Work};
use ascend_spec::{Cann, DType, Dims, Soc, Target, TensorDesc};
use half::{bf16, f16};
use std::collections::HashMap;

/// The newest release on Atlas A2.
pub(super) const TARGET: Target = Target::new(Soc::AtlasA2, Cann::NEWEST);

/// A call that satisfies every rule, with its data. Outputs are poisoned.
#[derive(Clone, Debug)]
pub(super) struct FlashCall {
    pub(super) version: Version,
    pub(super) arguments: Arguments<TensorDesc>,
    pub(super) data: HashMap<Parameter, Vec<u8>>,
}

/// Sizes of a call.
struct Sizes {
    layout: InputLayout,
    dtype: DType,
    heads: usize,
    kv_heads: usize,
    dim: usize,
    value_dim: usize,
    /// Rows and keys of each sequence.
    lengths: Vec<(usize, usize)>,
    /// Rows and keys after the last sequence.
    tail: (usize, usize),
}

impl Sizes {
    fn random(random: &mut Random, plain: bool) -> Self {
        let layouts = match plain {
            true => &[InputLayout::Bsh, InputLayout::Bsnd, InputLayout::Bnsd, InputLayout::Tnd][..],
            false => &InputLayout::ALL[..],
        };
        let layout = layouts[random.below(layouts.len())];
        let dtypes = [DType::Float16, DType::Bf16, DType::Float];
        let kv_heads = 1 + random.below(3);
        let long = random.below(8) == 0;
        let equal = random.below(3) == 0;
        let mut one = || {
            let keys = if long { 600 + random.below(900) } else { 1 + random.below(150) };
            let rows = match equal {
                true if !long => keys,
                _ if long => 1 + random.below(5),
                _ => 1 + random.below(70),
            };
            (rows, keys)
        };
        let batch_of = one();
        let lengths = match layout.is_packed() {
            true => [one(), one(), one()].to_vec(),
            false => vec![batch_of],
        };
        let batch = 1 + random.below(3);
        let lengths: Vec<_> = match layout.is_packed() {
            true => {
                let empty = |(rows, keys), which| match which {
                    0 => (0, keys),
                    1 => (rows, 0),
                    2 => (0, 0),
                    _ => (rows, keys),
                };
                let some = lengths.into_iter().take(batch);
                some.map(|lengths| empty(lengths, random.below(16))).collect()
            }
            false => lengths.repeat(batch),
        };
        let dim = match (plain, random.below(8)) {
            (true, _) => [16, 64, 128][random.below(3)],
            (_, 0) => 8 * (1 + random.below(96)),
            (_, 1) => 1 + random.below(40),
            _ => 8 * (1 + random.below(16)),
        };
        let value_dim = match random.below(3) {
            0 if !plain => 1 + random.below(dim),
            _ => dim,
        };
        let tail = match random.below(4) {
            0 if !plain => (1 + random.below(3), 1 + random.below(3)),
            1 if !plain => (1 + random.below(3), 0),
            _ => (0, 0),
        };
        Sizes {
            layout,
            dtype: dtypes[random.below(if plain { 2 } else { 3 })],
            heads: kv_heads * (1 + random.below(4)),
            kv_heads,
            dim,
            value_dim,
            lengths,
            tail,
        }
    }

    fn longest(&self) -> (usize, usize) {
        let most = |(q, kv): (usize, usize), &(rows, keys): &(usize, usize)| (q.max(rows), kv.max(keys));
        self.lengths.iter().fold((0, 0), most)
    }

    fn total(&self) -> (usize, usize) {
        let sum = |(q, kv): (usize, usize), &(rows, keys): &(usize, usize)| (q + rows, kv + keys);
        self.lengths.iter().fold((0, 0), sum)
    }

    fn scores(&self) -> usize {
        self.lengths.iter().map(|(rows, keys)| rows * keys).sum()
    }

    /// A tensor of rows.
    fn rows(&self, rows: usize, tail: usize, heads: usize, dim: usize) -> TensorDesc {
        let batch = self.lengths.len();
        let shape: &[usize] = match self.layout {
            InputLayout::Bsh => &[batch, rows, heads * dim],
            InputLayout::Sbh => &[rows, batch, heads * dim],
            InputLayout::Bsnd => &[batch, rows, heads, dim],
            InputLayout::Bnsd => &[batch, heads, rows, dim],
            InputLayout::Tnd => &[rows + tail, heads, dim],
        };
        desc(self.dtype, shape)
    }
}

fn desc(dtype: DType, shape: &[usize]) -> TensorDesc {
    let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
    TensorDesc::contiguous(dtype, &shape).unwrap()
}

impl FlashCall {
    /// A random call from `seed`: of anything, or, if `plain`, without features that FusedInferAttentionScore does
    /// not have.
    pub(super) fn random(seed: u64, plain: bool) -> Self {
        let mut random = Random(seed);
        loop {
            let sizes = Sizes::random(&mut random, plain);
            let (version, arguments) = describe(&sizes, &mut random, plain);
            let checked = arguments.call();
            let checked = checked.check(version, TARGET);
            if checked.is_ok_and(|problem| problem.work == Work::Attend) {
                let data = fill(&arguments, &sizes, &mut random);
                return FlashCall { version, arguments, data };
            }
        }
    }
}

fn describe(sizes: &Sizes, random: &mut Random, plain: bool) -> (Version, Arguments<TensorDesc>) {
    let packed = sizes.layout.is_packed();
    let version = if packed { Version::VarLenV5 } else { Version::V3 };
    let (longest, total) = (sizes.longest(), sizes.total());
    let (rows, keys) = if packed { total } else { longest };
    let mut arguments = FlashAttentionCall::new(sizes.layout.as_str()).to_arguments();
    let of_query = sizes.rows(rows, sizes.tail.0, sizes.heads, sizes.dim);
    // Every second row of a tensor of its own, now and then.
    let spread = |mut of: TensorDesc, apart: bool| {
        if apart {
            let strides: Vec<i64> = of.strides.iter().map(|stride| stride * 2).collect();
            of.strides = Dims::new(&strides).unwrap();
        }
        of
    };
    let apart = random.below(5) == 0;
    arguments.query = Some(spread(of_query, apart));
    let of_key = |dim| sizes.rows(keys, sizes.tail.1, sizes.kv_heads, dim);
    arguments.key = Some(spread(of_key(sizes.dim), apart));
    arguments.value = Some(spread(of_key(sizes.value_dim), apart));
    let out = sizes.rows(rows, sizes.tail.0, sizes.heads, sizes.value_dim);
    arguments.attention_out = Some(spread(out, apart));
    let (batch, heads) = (sizes.lengths.len(), sizes.heads);
    let softmax = match packed {
        true => desc(DType::Float, &[rows + sizes.tail.0, heads, 8]),
        false => desc(DType::Float, &[batch, heads, rows, 8]),
    };
    (arguments.softmax_max, arguments.softmax_sum) = (Some(softmax), Some(softmax));
    arguments.num_heads = heads as i64;
    arguments.scale = 1.0 / (sizes.dim as f64).sqrt();
    if packed {
        let ends = |length: fn(&(usize, usize)) -> usize, marked: bool| {
            let sums = sizes.lengths.iter().scan(0, |sum, lengths| {
                *sum += length(lengths) as i64;
                Some(*sum)
            });
            Some(sums.chain(marked.then_some(0)).collect::<Vec<i64>>())
        };
        let marked = sizes.tail.1 > 0;
        arguments.actual_seq_lengths = ends(|lengths| lengths.0, marked);
        arguments.actual_seq_lengths_kv = ends(|lengths| lengths.1, marked);
    }
    mask(&mut arguments, sizes, random, plain);
    if plain {
        return (version, arguments);
    }
    arguments.inner_precise = [0, 0, 2][random.below(3)];
    bias(&mut arguments, sizes, random);
    if random.below(4) == 0 {
        let bits = sizes.scores() * heads;
        arguments.drop_mask = Some(desc(DType::UInt8, &[bits.div_ceil(128).max(1) * 16]));
        arguments.keep_prob = [0.9, 0.5, 1.0][random.below(3)];
    }
    if random.below(4) == 0 {
        arguments.sink = Some(desc(DType::Float, &[heads]));
    }
    if packed {
        let orders = [None, Some(FlashAttentionCall::SAME_AS_INPUT.to_owned())];
        arguments.softmax_out_layout = orders[random.below(2)].clone();
        if random.below(4) == 0 && sizes.dtype == DType::Bf16 {
            let rope = 8 * (1 + random.below(8));
            let query = sizes.rows(rows, sizes.tail.0, heads, rope);
            arguments.query_rope = Some(query);
            arguments.key_rope = Some(of_key(rope));
        }
    }
    (version, arguments)
}

fn mask(arguments: &mut Arguments<TensorDesc>, sizes: &Sizes, random: &mut Random, plain: bool) {
    let (rows, keys) = sizes.longest();
    let (batch, heads) = (sizes.lengths.len(), sizes.heads);
    let mode = match plain {
        true => [0, 2, 3, 4][random.below(4)],
        false => random.below(9) as i64,
    };
    if mode == 0 && random.below(2) == 0 {
        return;
    }
    arguments.sparse_mode = mode;
    let near = |random: &mut Random, most: usize| random.below(2 * most + 3) as i64 - most as i64 - 1;
    if random.below(3) > 0 && (mode != 0 || !plain) {
        arguments.pre_tokens = near(random, keys);
        arguments.next_tokens = near(random, keys);
    }
    if matches!(mode, 7 | 8) && random.below(3) > 0 {
        arguments.pre_tokens = keys as i64;
        arguments.next_tokens = -(random.below(keys.max(1)) as i64);
    }
    if matches!(mode, 5 | 6) {
        let prefix = (0..batch).map(|_| random.below(keys + 1) as i64);
        arguments.prefix = Some(prefix.collect());
    }
    let total = sizes.total();
    let shape = match mode {
        2 | 3 | 4 | 7 | 8 => vec![2048, 2048],
        6 => vec![3072, 2048],
        _ => match random.below(if plain { 1 } else { 5 }) {
            0 => vec![rows, keys],
            1 => vec![1, 1, rows, keys],
            2 => vec![batch, 1, rows, keys],
            3 if sizes.layout.is_packed() => vec![total.0, total.1],
            _ => vec![batch, heads, rows, keys],
        },
    };
    let dtype = [DType::Bool, DType::UInt8][random.below(2)];
    arguments.atten_mask = Some(desc(dtype, &shape));
}

fn bias(arguments: &mut Arguments<TensorDesc>, sizes: &Sizes, random: &mut Random) {
    let (rows, keys) = sizes.longest();
    let (batch, heads) = (sizes.lengths.len(), sizes.heads);
    if random.below(2) == 0 {
        return;
    }
    arguments.pse_type = random.below(4) as i64;
    let of_batch = [1, batch][random.below(2)];
    let packed = sizes.layout.is_packed();
    arguments.real_shift = Some(match (arguments.pse_type, random.below(3)) {
        (2 | 3, 0) => desc(DType::Float, &[heads]),
        (2 | 3, _) => desc(DType::Float, &[batch, heads]),
        (_, 0) if packed => desc(sizes.dtype, &[heads * sizes.scores()]),
        (_, 1) if packed => desc(sizes.dtype, &[heads * sizes.total().1]),
        (_, _) if packed => desc(sizes.dtype, &[of_batch, heads, 1024, keys]),
        (_, 0) => desc(sizes.dtype, &[of_batch, heads, 1, keys]),
        _ => desc(sizes.dtype, &[of_batch, heads, rows, keys]),
    });
    if matches!(arguments.pse_type, 2 | 3) && random.below(2) == 0 {
        arguments.q_start_idx = Some(vec![random.below(50) as i64]);
        arguments.kv_start_idx = Some(vec![random.below(50) as i64]);
    }
}

/// Bytes of an element that holds a number.
fn bytes(dtype: DType, number: f32) -> Vec<u8> {
    match dtype {
        DType::Float16 => f16::from_f32(number).to_le_bytes().to_vec(),
        DType::Bf16 => bf16::from_f32(number).to_le_bytes().to_vec(),
        _ => number.to_le_bytes().to_vec(),
    }
}

fn fill(arguments: &Arguments<TensorDesc>, sizes: &Sizes, random: &mut Random) -> HashMap<Parameter, Vec<u8>> {
    let mut data = HashMap::new();
    let often = [2, 5, 20][random.below(3)];
    for (argument, desc) in arguments.each_tensor() {
        let parameter = argument.parameter;
        let size = desc.dtype.size().unwrap();
        let elements = desc.byte_range().unwrap().end as usize / size;
        let number = |random: &mut Random| random.below(2001) as f32 / 1000.0 - 1.0;
        let filled: Vec<u8> = match parameter {
            Parameter::AttenMask if arguments.sparse_mode > 1 && arguments.sparse_mode != 5 => {
                vec![]
            }
            Parameter::AttenMask => {
                // Whole rows are hidden, too.
                let row = sizes.longest().1.max(1);
                let mut hidden = false;
                let one = |index: usize| {
                    if index.is_multiple_of(row) {
                        hidden = random.below(9) == 0;
                    }
                    u8::from(hidden || random.below(often) == 0)
                };
                (0..elements).map(one).collect()
            }
            Parameter::DropMask => (0..elements).map(|_| random.below(256) as u8).collect(),
            _ if parameter.is_output() => vec![0xff; elements * size],
            Parameter::RealShift if arguments.pse_type > 1 => {
                (0..elements).flat_map(|_| bytes(desc.dtype, random.below(100) as f32 / 500.0)).collect()
            }
            _ => (0..elements).flat_map(|_| bytes(desc.dtype, number(random))).collect(),
        };
        data.insert(parameter, filled);
    }
    data
}
