//! Calls that releases from 8.5 on take, drawn from all that has a name: a call that its target refuses is drawn again.

use super::contents::{arguments_of, reach};
use super::paths::{CACHES, HALVES, ends, length, pick};
use super::{Call, Random, ascend950, cached, desc};
use ascend_spec::attention_problem::Work;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use ascend_spec::{DType, Extents, Layout, Soc, SparseMode, Target, TensorDesc};

const LAYOUTS: [Layout; 9] = [
    Layout::Bsh,
    Layout::Bsnd,
    Layout::Bnsd,
    Layout::BnsdBsnd,
    Layout::BshBnsd,
    Layout::BsndBnsd,
    Layout::Tnd,
    Layout::Ntd,
    Layout::NtdTnd,
];

/// The layouts of the absorbed form of latent attention.
const LATENT: [Layout; 8] = [
    Layout::Bsh,
    Layout::Bsnd,
    Layout::Bnsd,
    Layout::Tnd,
    Layout::BshNbsd,
    Layout::BsndNbsd,
    Layout::BnsdNbsd,
    Layout::TndNtd,
];

/// The first call from `seed` on that `target` takes, that has something to compute and that reads its tensors alone.
pub fn accepted(seed: u64, target: Target) -> Call {
    first_sound((0..10_000).map(|more| drawn(seed.wrapping_add(more), target)))
}

/// The first call from `seed` on over a paged cache whose blocks lie apart that `target` takes.
pub fn blocks_apart(seed: u64, target: Target) -> Call {
    let of_950 = target.soc == Soc::Ascend950;
    let draw = |seed| match of_950 {
        true => [ascend950::half, ascend950::latent][seed as usize % 2](seed),
        false => drawn(seed, target),
    };
    let all = (0..100_000).map(|more| draw(seed.wrapping_add(more)));
    let paged = all.filter(|call| call.plain.block_table.is_some() && call.key.len() == 1);
    first_sound(paged.map(|mut call| {
        call.target = target;
        let random = &mut Random(call.seed ^ 0x51de_b10c);
        let rope = call.plain.key_rope.iter_mut();
        for desc in call.key.iter_mut().chain(&mut call.value).chain(rope) {
            let block = desc.strides[0] * pick(random, &[1, 2, 3]);
            let apart = block + pick(random, &[16, 16, 48, 1024]);
            desc.strides = desc.strides.with(0, apart);
        }
        call
    }))
}

/// The first of these calls that its target takes and that a test computes in a moment.
fn first_sound(mut all: impl Iterator<Item = Call>) -> Call {
    let mut call = all.find(|call| sound(call) && small(call)).unwrap();
    let size = SparseMode::COMPRESSED_MASK_SIZE as usize;
    let compressed = (2..=4).contains(&call.plain.sparse_mode);
    if compressed && call.plain.atten_mask.is_some() {
        // A single row reads the triangle element by element.
        let mut bytes = vec![0; size * size];
        for (i, row) in bytes.chunks_mut(size).enumerate() {
            row[i + 1..].fill(1);
        }
        call.contents.push((Parameter::AttenMask.into(), bytes));
    }
    call
}

/// Whether a test computes an accepted call in a moment: some draws have hundreds of heads, others hundreds of keys.
fn small(call: &Call) -> bool {
    let described = call.describe();
    arguments_of(&described)
        .into_iter()
        .all(|argument| described.tensor(argument).is_none_or(|desc| reach(desc) <= 8 << 20))
}

/// Whether the contract takes a call, and none of its lints says that the device may leave the tensors.
pub fn sound(call: &Call) -> bool {
    let described = call.describe();
    let Ok(checked) = described.check(call.version, call.target) else {
        return false;
    };
    let mut overruns = false;
    checked.each_lint(&mut |lint| overruns |= lint.rule.overruns);
    checked.problem.work == Work::Attend && !overruns
}

/// Head dimensions of query and value, and whether rotary parts go with them.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Plain,
    Split,
    Combined,
    Absorbed,
}

fn one_in(random: &mut Random, times: usize) -> bool {
    random.below(times) == 0
}

/// Some call, taken or not.
fn drawn(seed: u64, target: Target) -> Call {
    let random = &mut Random(seed ^ 0x2545_f491_4f6c_dd1d);
    random.unit();
    let form = pick(
        random,
        &[
            Form::Plain,
            Form::Plain,
            Form::Plain,
            Form::Split,
            Form::Split,
            Form::Combined,
            Form::Absorbed,
            Form::Absorbed,
        ],
    );
    let layout = match form {
        Form::Absorbed => pick(random, &LATENT),
        _ => pick(random, &LAYOUTS),
    };
    let dtype = pick(random, &HALVES);
    let (dim, value_dim) = match form {
        Form::Plain => {
            let dim = pick(random, &[64, 64, 128, 128, 192, 16, 80, 96, 256, 1 + seed as i64 % 250]);
            (dim, dim)
        }
        Form::Split => (128, 128),
        Form::Combined => (192, 128),
        Form::Absorbed => (512, 512),
    };
    let many = one_in(random, 8);
    let (heads, kv_heads) = match form {
        Form::Absorbed => (pick(random, &[1, 2, 8, 32]), 1),
        _ if many => pick(random, &[(65, 1), (130, 1), (260, 4), (264, 264)]),
        _ => pick(random, &[(1, 1), (2, 2), (4, 2), (4, 1), (12, 1), (17, 1)]),
    };
    let packed = layout.is_packed();
    let batch = 1 + random.below(3) as i64;
    let most = match (form, many) {
        (Form::Absorbed, _) => 12,
        (_, true) => 6,
        _ => 70,
    };
    let decode = one_in(random, 3);
    let some_rows = |random: &mut Random, least: i64| match decode {
        true => 1,
        false => length(random, least).min(most),
    };
    let rows = some_rows(random, 2);
    let mode = mode(random);
    let tree = mode == SparseMode::Tree.acl();
    let q_lens: Vec<i64> = (0..batch)
        .map(|b| match packed {
            true => some_rows(random, i64::from(b == 0)),
            false if one_in(random, 2) => random.below(rows as usize + 1) as i64,
            false => rows,
        })
        .collect();
    let extents = Extents {
        batch: if packed { 1 } else { batch },
        heads,
        rows: if packed { q_lens.iter().sum() } else { rows },
        dim,
    };
    let mut call = Call::new(layout, dtype, extents, seed);
    (call.target, call.version) = (target, Version::V4);
    let int8 = one_in(random, 6);
    let out = if int8 { DType::Int8 } else { dtype };
    let value_of = Extents { dim: value_dim, ..extents };
    call.output(out, value_of);
    call.plain.num_key_value_heads = kv_heads;
    call.plain.inner_precise = random.below(5) as i64;
    let some_lens = packed || one_in(random, 2);
    if some_lens {
        call.q_lens = Some(if packed { ends(&q_lens) } else { q_lens.clone() });
    }
    let rope = matches!(form, Form::Split | Form::Absorbed);
    // Of a tree the rows are keys too.
    let least = |b: usize| match () {
        () if tree && some_lens => q_lens[b],
        () if tree => rows,
        () => 0,
    };
    let keys = keys(&mut call, random, (kv_heads, dim, value_dim), rope, batch, least);
    if rope {
        let shape = layout.input().shape(Extents { dim: 64, ..extents });
        call.plain.query_rope = Some(desc(dtype, &shape));
    }
    let classic = form == Form::Plain && !packed && call.plain.block_table.is_none();
    let mut padded = false;
    let mut prefix = 0;
    if classic && one_in(random, 5) && call.key.len() == 1 {
        padded = call.kv_lens.is_some();
        left_padding(&mut call, random, rows, keys);
    } else if classic && one_in(random, 5) {
        prefix = shared_prefix(&mut call, random, kv_heads, dim);
    }
    let longest = match (&call.kv_lens, packed && call.plain.block_table.is_none()) {
        (Some(lens), false) => lens.iter().copied().max().unwrap_or(0),
        (Some(lens), true) => {
            let starts = std::iter::once(&0).chain(lens);
            lens.iter().zip(starts).map(|(end, start)| end - start).max().unwrap_or(0)
        }
        (None, _) => keys,
    };
    // Newer releases need no columns behind the longest sequence.
    let columns = match padded || one_in(random, 2) {
        true => keys.max(longest),
        false => longest,
    };
    let squares: i64 = q_lens.iter().map(|len| len * len).sum();
    let tree_shape = match packed {
        true => vec![squares.max(1)],
        false => vec![batch, rows, rows],
    };
    let longest_rows = q_lens.iter().copied().max().unwrap_or(0);
    let rows = if packed { longest_rows } else { rows };
    mask(&mut call, random, mode, [batch, rows, columns + prefix], &tree_shape);
    if one_in(random, 4) {
        call.plain.learnable_sink = Some(desc(pick(random, &[DType::Bf16, dtype]), &[heads]));
    }
    if (classic || packed) && one_in(random, 5) {
        let more = random.below(2) as i64;
        let all = if packed { longest } else { keys.max(longest) };
        let shape = [pick(random, &[1, batch]), heads, rows + more, all + prefix + more];
        call.plain.pse_shift = Some(desc(dtype, &shape));
    }
    if int8 {
        let number = pick(random, &[DType::Float, dtype]);
        let channels = [heads, value_dim];
        let shape = pick(random, &[&[1][..], &channels]);
        call.plain.quant_scale2 = Some(desc(number, shape));
        call.plain.quant_offset2 = one_in(random, 2).then(|| desc(number, shape));
    }
    if one_in(random, 2) {
        call.lse(extents);
    }
    call
}

fn mode(random: &mut Random) -> i64 {
    match random.below(12) {
        0..3 => 0,
        3 => 1,
        4 => 2,
        5..7 => 3,
        7 => 4,
        8 => pick(random, &[7, -1, 12]),
        _ => SparseMode::Tree.acl(),
    }
}

/// Keys of one tensor, of a list or of a paged cache; gives the rows that a sequence can have.
fn keys(
    call: &mut Call,
    random: &mut Random,
    (kv_heads, dim, value_dim): (i64, i64, i64),
    rope: bool,
    batch: i64,
    least: impl Fn(usize) -> i64,
) -> i64 {
    let (layout, dtype) = (call.layout, call.plain.query.unwrap().dtype);
    let packed = layout.is_packed();
    let mut lens: Vec<i64> = (0..batch as usize).map(|b| length(random, 0).min(200).max(least(b))).collect();
    if one_in(random, 3) {
        let cache = pick(random, &CACHES);
        let block_size = pick(random, &[16, 48, 128, 256, 512, 1024]);
        // Large blocks of many heads are much memory.
        let block_size = match kv_heads * dim * block_size {
            0..=600_000 => block_size,
            _ => 16,
        };
        let dims = [kv_heads, block_size, dim, value_dim];
        call.pages(cache, dtype, dims, &lens, random);
        let blocks = call.key[0].shape[0];
        let rope = rope.then(|| cached(cache, dtype, [blocks, kv_heads, block_size, 64]));
        call.plain.key_rope = rope;
        return call.plain.block_table.unwrap().shape[1] * block_size;
    }
    // No keys at all is another path.
    lens[0] = lens[0].max(1);
    let longest = lens.iter().copied().max().unwrap();
    let extents = Extents {
        batch: if packed { 1 } else { batch },
        heads: kv_heads,
        rows: match packed {
            true => lens.iter().sum(),
            false => longest + random.below(3) as i64,
        },
        dim,
    };
    call.keys(dtype, extents, value_dim);
    if rope {
        let shape = layout.input().shape(Extents { dim: 64, ..extents });
        call.plain.key_rope = Some(desc(dtype, &shape));
    }
    if packed {
        call.kv_lens = Some(ends(&lens));
        return longest;
    }
    if batch > 1 && one_in(random, 6) {
        // More than one entry in a tensor, of which the first counts.
        let entries = 1 + random.below(2) as i64;
        let one = |dim: i64| {
            let tensor = |&rows: &i64| {
                let extents = Extents { batch: entries, rows: rows.max(1), dim, ..extents };
                TensorDesc::packed(dtype, layout.input().shape(extents))
            };
            lens.iter().map(tensor).collect()
        };
        (call.key, call.value) = (one(dim), one(value_dim));
        call.kv_lens = one_in(random, 2).then_some(lens);
        return longest;
    }
    if one_in(random, 2) {
        call.kv_lens = Some(lens);
    }
    extents.rows
}

fn left_padding(call: &mut Call, random: &mut Random, rows: i64, keys: i64) {
    for (parameter, rows) in [(Parameter::KvPaddingSize, keys), (Parameter::QueryPaddingSize, rows)] {
        if one_in(random, 3) {
            continue;
        }
        let size = Some(desc(DType::Int64, &[1]));
        match parameter {
            Parameter::KvPaddingSize => call.plain.kv_padding_size = size,
            _ => call.plain.query_padding_size = size,
        }
        let padding = random.below(rows as usize + 3) as i64 - 2;
        call.contents.push((parameter.into(), padding.to_le_bytes().to_vec()));
    }
}

fn shared_prefix(call: &mut Call, random: &mut Random, heads: i64, dim: i64) -> i64 {
    let (layout, dtype) = (call.layout, call.plain.query.unwrap().dtype);
    let rows = length(random, 1).min(100);
    let shape = layout.input().shape(Extents { batch: 1, heads, rows, dim });
    call.plain.key_shared_prefix = Some(desc(dtype, &shape));
    call.plain.value_shared_prefix = Some(desc(dtype, &shape));
    let len = random.below(rows as usize + 1) as i64;
    call.prefix_len = one_in(random, 2).then(|| vec![len]);
    rows
}

fn mask(call: &mut Call, random: &mut Random, mode: i64, [batch, rows, keys]: [i64; 3], tree: &[i64]) {
    call.plain.sparse_mode = mode;
    let tokens = |random: &mut Random| random.below(60) as i64 - 5;
    if matches!(mode, 0 | 4) && one_in(random, 2) {
        call.plain.pre_tokens = tokens(random);
        call.plain.next_tokens = tokens(random);
    }
    let (more, spare) = (random.below(3) as i64, random.below(9) as i64);
    let (i, j) = (rows + more, keys + spare);
    let entries = pick(random, &[1, batch]);
    let full = [vec![if rows == 1 { batch + more } else { i }, j], vec![entries, i, j], vec![entries, 1, i, j]];
    let size = SparseMode::COMPRESSED_MASK_SIZE;
    let compressed = [vec![size, size], vec![1, size, size], vec![1, 1, size, size]];
    let rank = random.below(3);
    let shape = match mode {
        0 if one_in(random, 2) => return,
        0 | 1 => &full[rank],
        9 => tree,
        2..=4 => &compressed[rank],
        _ if one_in(random, 2) => return,
        _ => &full[rank],
    };
    let dtype = pick(random, &[DType::Int8, DType::UInt8, DType::Bool]);
    let given = desc(dtype, shape);
    call.plain.atten_mask = Some(given);
    if (2..=4).contains(&mode) {
        return;
    }
    let most = pick(random, &[1, 2, 4, 20]);
    let count = given.elements().unwrap();
    let bytes = (0..count).map(|_| u8::from(random.below(most) == 0));
    call.contents.push((Parameter::AttenMask.into(), bytes.collect()));
}

/// Whether a call is one that the snapshot's contract does not take.
pub fn is_new(call: &Call) -> bool {
    let described: FiaCall<'_> = call.describe();
    let old = Target::snapshot(call.target.soc);
    described.check(call.version, old).is_err()
}
