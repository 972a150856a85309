//! Calls that Ascend 950 takes with CANN 9.1, and what the preview of 9.2 adds.

use super::paths::{CACHES, HALVES, HEADS, ends, length, pick};
use super::releases::sound;
use super::{Call, Random, cached, desc};
use ascend_spec::ops::fused_infer_attention_score::{Cache, Parameter, Version};
use ascend_spec::{Cann, DType, Dims, Extents, Layout, Soc, SparseMode, Target, TensorDesc};

const TARGET: Target = Target::new(Soc::Ascend950, Cann::V9_1);

const CLASSIC: [Layout; 4] = [Layout::Bsh, Layout::Bsnd, Layout::Bnsd, Layout::BnsdBsnd];
const PACKED: [Layout; 3] = [Layout::Tnd, Layout::Ntd, Layout::NtdTnd];
const TURNED: [Layout; 2] = [Layout::BsndBnsd, Layout::BshBnsd];
const LATENT: [Layout; 8] = [
    Layout::Bsh,
    Layout::Bsnd,
    Layout::BshNbsd,
    Layout::BsndNbsd,
    Layout::Tnd,
    Layout::TndNtd,
    Layout::Bnsd,
    Layout::BnsdNbsd,
];

/// The first call that the contract takes, and that leaves no tensor, of those that `draw` makes from this seed and
/// the ones after it.
pub fn accepted(draw: fn(u64) -> Call, seed: u64) -> Call {
    let mut random = Random(seed);
    let mut drawn = (0..1000).map(|_| draw(u64::from(random.unit().to_bits())));
    drawn.find(sound).unwrap()
}

/// Any of the kinds below.
pub fn any(seed: u64) -> Call {
    let kinds = [half, post_quantised, antiquant, latent, mxfp8];
    accepted(kinds[Random(seed ^ 0x1b05).below(kinds.len())], seed)
}

/// A call of these extents on Ascend 950.
fn new(layout: Layout, dtype: DType, extents: Extents, seed: u64) -> Call {
    let mut call = Call::new(layout, dtype, extents, seed);
    (call.target, call.version) = (TARGET, Version::V5);
    call
}

/// Sequences: of each its query rows and its keys.
struct Lengths {
    rows: Vec<i64>,
    keys: Vec<i64>,
}

impl Lengths {
    fn new(random: &mut Random, most_rows: i64) -> Self {
        let batch = 1 + random.below(3);
        let mut rows: Vec<i64> = (0..batch).map(|_| length(random, 0).min(most_rows)).collect();
        rows[0] = rows[0].max(1);
        let mut keys: Vec<i64> = (0..batch).map(|_| length(random, 0)).collect();
        keys[0] = keys[0].max(1);
        Lengths { rows, keys }
    }

    fn batch(&self) -> i64 {
        self.rows.len() as i64
    }

    /// The longest of each.
    fn most(&self) -> (i64, i64) {
        let most = |extents: &[i64]| extents.iter().copied().max().unwrap_or(0).max(1);
        (most(&self.rows), most(&self.keys))
    }

    /// Extents of queries and of keys in a layout, which packs them or leaves room.
    fn extents(&self, layout: Layout, [heads, kv_heads, dim]: [i64; 3]) -> [Extents; 2] {
        let (rows, keys) = match layout.is_packed() {
            true => (self.rows.iter().sum(), self.keys.iter().sum()),
            false => self.most(),
        };
        let batch = if layout.is_packed() { 1 } else { self.batch() };
        let extents = |heads, rows| Extents { batch, heads, rows, dim };
        [extents(heads, rows), extents(kv_heads, keys)]
    }

    /// Tells the call: always where it packs or pages, elsewhere now and then.
    fn tell(&self, call: &mut Call, paged: bool, random: &mut Random) {
        let packed = call.layout.is_packed();
        if packed {
            call.q_lens = Some(ends(&self.rows));
        } else if random.below(2) == 0 {
            call.q_lens = Some(self.rows.clone());
        }
        if packed && !paged {
            call.kv_lens = Some(ends(&self.keys));
        } else if paged || random.below(2) == 0 {
            call.kv_lens = Some(self.keys.clone());
        }
    }
}

/// Shape of the rotary part of a tensor of these extents.
fn rope(layout: Layout, dtype: DType, extents: Extents) -> TensorDesc {
    TensorDesc::packed(dtype, layout.input().shape(Extents { dim: 64, ..extents }))
}

/// A mask of some kind for sequences of these lengths, `keys` at most.
fn mask(call: &mut Call, lengths: &Lengths, keys: i64, modes: &[i64], random: &mut Random) {
    let mode = pick(random, modes);
    call.plain.inner_precise = random.below(4) as i64;
    match mode {
        -1 => {}
        0 | 1 => {
            let spare = random.below(9) as i64;
            let rows = lengths.most().0 + random.below(3) as i64;
            let batch = pick(random, &[1, lengths.batch()]);
            let shape = match random.below(2) {
                0 => vec![batch, rows, keys + spare],
                _ => vec![batch, 1, rows, keys + spare],
            };
            let mask = desc(DType::Bool, &shape);
            let count = mask.elements().unwrap() as usize;
            let often = pick(random, &[2, 4, 40]);
            let bytes = (0..count).map(|_| u8::from(random.below(often) == 0));
            call.contents.push((Parameter::AttenMask.into(), bytes.collect()));
            call.plain.atten_mask = Some(mask);
            call.plain.sparse_mode = mode;
        }
        _ => {
            call.masked(SparseMode::from_acl(mode).unwrap());
            call.plain.atten_mask = Some(desc(DType::Bool, &[1, 2048, 2048]));
        }
    }
    if matches!(mode, 0 | 4) {
        call.plain.pre_tokens = random.below(90) as i64 - 20;
        call.plain.next_tokens = random.below(90) as i64 - 20;
    }
}

/// Half precision throughout: every layout, unequal heads, caches, prefixes, padding, lists, biases, sinks.
pub fn half(seed: u64) -> Call {
    let random = &mut Random(seed);
    let dtype = pick(random, &HALVES);
    let layout = match random.below(3) {
        0 => pick(random, &PACKED),
        1 => pick(random, &TURNED),
        _ => pick(random, &CLASSIC),
    };
    let dims: &[(i64, i64)] = match layout {
        Layout::Bsh | Layout::Bsnd | Layout::Bnsd | Layout::Tnd => &[
            (1, 1),
            (7, 7),
            (36, 36),
            (50, 50),
            (64, 64),
            (96, 96),
            (128, 128),
            (64, 128),
            (128, 64),
            (40, 72),
            (17, 5),
            (192, 128),
        ],
        Layout::BnsdBsnd => &[(16, 16), (48, 48), (128, 128), (192, 128)],
        _ => &[(64, 64), (128, 128), (192, 128)],
    };
    let (dim, value_dim) = pick(random, dims);
    let (heads, kv_heads) = pick(random, &[HEADS[1], HEADS[2], HEADS[4], (70, 1), (3, 3)]);
    let most_rows = pick(random, &[1, 9, 300]);
    let lengths = Lengths::new(random, most_rows);
    let [extents, keys] = lengths.extents(layout, [heads, kv_heads, dim]);
    let mut call = new(layout, dtype, extents, seed);
    call.output(dtype, Extents { dim: value_dim, ..extents });
    let with_rope = dim == 128 && value_dim == 128 && random.below(3) == 0;
    let kind = random.below(6);
    let mut prefix = 0;
    let mut capacity = lengths.most().1;
    match kind {
        0 | 1 => {
            let cache = pick(random, &CACHES);
            let block_size = pick(random, &[16, 48, 128]);
            let sizes = [kv_heads, block_size, dim, value_dim];
            call.pages(cache, dtype, sizes, &lengths.keys, random);
            let blocks = call.key[0].shape[0];
            let rope = cached(cache, dtype, [blocks, kv_heads, block_size, 64]);
            call.plain.key_rope = with_rope.then_some(rope);
            capacity = (capacity + block_size - 1) / block_size * block_size;
        }
        2 if CLASSIC.contains(&layout) && lengths.batch() > 1 => {
            let one = |rows: i64, dim| {
                let extents = Extents { batch: 1, rows: rows.max(1), dim, ..keys };
                TensorDesc::packed(dtype, layout.input().shape(extents))
            };
            // Rotary parts are one tensor for all, beside keys of one length.
            let all = vec![keys.rows; lengths.keys.len()];
            let each = if with_rope { &all } else { &lengths.keys };
            call.key = each.iter().map(|&rows| one(rows, dim)).collect();
            call.value = each.iter().map(|&rows| one(rows, value_dim)).collect();
            call.plain.key_rope = with_rope.then(|| rope(layout, dtype, keys));
            call.plain.num_key_value_heads = kv_heads;
        }
        _ => {
            call.keys(dtype, keys, value_dim);
            call.plain.key_rope = with_rope.then(|| rope(layout, dtype, keys));
        }
    }
    call.plain.query_rope = call.plain.key_rope.map(|_| rope(layout, dtype, extents));
    lengths.tell(&mut call, kind < 2, random);
    match kind {
        3 if CLASSIC.contains(&layout) => {
            prefix = length(random, 1);
            let shape = |dim| layout.input().shape(Extents { batch: 1, rows: prefix, dim, ..keys });
            call.plain.key_shared_prefix = Some(TensorDesc::packed(dtype, shape(dim)));
            call.plain.value_shared_prefix = Some(TensorDesc::packed(dtype, shape(value_dim)));
            if random.below(2) == 0 {
                call.prefix_len = Some(vec![random.below(prefix as usize + 1) as i64]);
            }
        }
        4 if !layout.is_packed() => {
            call.q_lens = Some(lengths.rows.clone());
            call.kv_lens = Some(lengths.keys.clone());
            for (parameter, most) in
                [(Parameter::QueryPaddingSize, lengths.most().0), (Parameter::KvPaddingSize, lengths.most().1)]
            {
                let padding = random.below(most as usize + 3) as i64 - 2;
                let bytes = padding.to_le_bytes().to_vec();
                call.contents.push((parameter.into(), bytes));
            }
            call.plain.query_padding_size = Some(desc(DType::Int64, &[1]));
            call.plain.kv_padding_size = Some(desc(DType::Int64, &[1]));
        }
        5 if CLASSIC.contains(&layout) => {
            let batch = pick(random, &[1, extents.batch]);
            let spare = random.below(9) as i64;
            let shape = [batch, heads, extents.rows + spare, capacity + spare];
            call.plain.pse_shift = Some(desc(dtype, &shape));
        }
        _ if random.below(2) == 0 => {
            call.plain.learnable_sink = Some(desc(dtype, &[heads]));
        }
        _ => {}
    }
    let all = [-1, 0, 1, 2, 3, 4];
    mask(&mut call, &lengths, capacity + prefix, &all, random);
    if call.plain.learnable_sink.is_some() {
        call.plain.inner_precise = 0;
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// [`half`] with an output of 8 bits.
pub fn post_quantised(seed: u64) -> Call {
    let mut call = half(seed);
    let random = &mut Random(seed ^ 0xf00d);
    let out = call.plain.attention_out.unwrap();
    let dtype = pick(random, &[DType::Int8, DType::Float8E4M3Fn, DType::HiFloat8]);
    let (heads, rank) = (call.plain.num_heads, out.shape.rank());
    let dim = match call.layout {
        Layout::Bsh => out.shape[2] / heads,
        _ => out.shape[rank - 1],
    };
    call.plain.attention_out = Some(TensorDesc::packed(dtype, out.shape));
    let shape =
        pick(random, &[Dims::of([1]), Dims::of([heads, dim]), Dims::of([heads * dim]), Dims::of([1, heads, 1, dim])]);
    let own = call.plain.query.unwrap().dtype == DType::Bf16 && random.below(2) == 0;
    let number = if own { DType::Bf16 } else { DType::Float };
    call.plain.quant_scale2 = Some(TensorDesc::packed(number, shape));
    call.plain.quant_offset2 = (random.below(2) == 0).then_some(TensorDesc::packed(number, shape));
    call
}

/// Codes of powers of two about 1, for each byte of a tensor.
fn powers(call: &mut Call, parameter: Parameter, scale: TensorDesc, random: &mut Random) {
    let bytes = (0..scale.elements().unwrap()).map(|_| 123 + random.below(5) as u8);
    call.contents.push((parameter.into(), bytes.collect()));
}

/// Quantised keys and values under a half-precision query.
pub fn antiquant(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let dtype = pick(random, &HALVES);
    let (stored, modes): (DType, &[(i64, i64)]) = pick(
        random,
        &[
            (DType::Int8, &[(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (0, 1)][..]),
            (DType::Int4, &[(0, 0), (1, 1), (3, 3), (0, 1)]),
            (DType::Int32, &[(0, 0), (1, 1), (3, 3), (0, 1)]),
            (DType::Float8E4M3Fn, &[(0, 0), (1, 1), (4, 4)]),
            (DType::HiFloat8, &[(0, 0)]),
            (DType::Float4E2M1, &[(6, 6)]),
        ],
    );
    let modes = pick(random, modes);
    let layouts = [Layout::Bsh, Layout::Bsnd, Layout::Bnsd, Layout::BnsdBsnd, Layout::Tnd];
    let layout = pick(random, &layouts);
    let dim = pick(random, &[32, 64, 128]);
    let most_rows = match stored {
        DType::Int4 | DType::Int32 => 1,
        DType::Int8 => pick(random, &[1, 16]),
        _ => pick(random, &[1, 16, 200]),
    };
    let lengths = Lengths::new(random, most_rows);
    let [extents, keys] = lengths.extents(layout, [heads, kv_heads, dim]);
    let mut call = new(layout, dtype, extents, seed);
    let held = if stored == DType::Int32 { dim / 8 } else { dim };
    let keys = Extents { dim: held, ..keys };
    let paged = modes.0 >= 4 && modes.0 != 6 || random.below(2) == 0;
    let mut capacity = lengths.most().1;
    let block_size = 64;
    if paged {
        let cache = pick(random, &CACHES);
        let sizes = [kv_heads, block_size, held, held];
        call.pages(Cache::BnNBsD, stored, sizes, &lengths.keys, random);
        let blocks = call.key[0].shape[0];
        // Runs of 16 elements, whatever their type.
        let lanes = 16 * held / dim;
        let key = match cache {
            Cache::BnBsH => desc(stored, &[blocks, block_size, kv_heads * held]),
            Cache::BnNBsD => call.key[0],
            Cache::Nz => desc(stored, &[blocks, kv_heads, dim / 16, block_size, lanes.max(1)]),
        };
        (call.key, call.value) = (vec![key], vec![key]);
        capacity = call.plain.block_table.unwrap().shape[1] * block_size;
    } else {
        call.keys(stored, keys, held);
    }
    lengths.tell(&mut call, paged, random);
    let (batch, blocks) = (lengths.batch(), call.key[0].shape[0]);
    let spare = capacity + random.below(3) as i64;
    let h = kv_heads * dim;
    let whole = random.below(3);
    let mut scale = |mode| match mode {
        0 if stored == DType::Int8 && whole == 0 => desc(dtype, &[1]),
        0 => match random.below(3) {
            0 => desc(dtype, &[h]),
            1 => desc(dtype, &[1, kv_heads, 1, dim]),
            _ => desc(dtype, &[kv_heads, dim]),
        },
        1 => desc(DType::Float, &[batch, spare]),
        2 => desc(dtype, &[kv_heads]),
        3 => desc(DType::Float, &[batch, kv_heads, spare]),
        4 => desc(DType::Float, &[blocks, block_size]),
        5 => desc(DType::Float, &[blocks, kv_heads, block_size]),
        _ => desc(DType::Float8E8M0, &[1, batch, kv_heads, spare, dim / 32]),
    };
    let key = scale(modes.0);
    let value = match modes {
        (0, 1) => scale(1),
        _ => key,
    };
    call.plain.key_antiquant_scale = Some(key);
    call.plain.value_antiquant_scale = Some(value);
    if modes.0 == 6 {
        powers(&mut call, Parameter::KeyAntiquantScale, key, random);
        powers(&mut call, Parameter::ValueAntiquantScale, value, random);
    }
    let integers = matches!(stored, DType::Int8 | DType::Int4 | DType::Int32);
    if integers && random.below(2) == 0 {
        call.plain.key_antiquant_offset = Some(key);
        call.plain.value_antiquant_offset = Some(value);
    }
    (call.plain.key_antiquant_mode, call.plain.value_antiquant_mode) = modes;
    let modes: &[i64] = match lengths.most().0 {
        1 => &[-1, 0],
        _ => &[-1, 0, 1, 2, 3, 4],
    };
    mask(&mut call, &lengths, capacity, modes, random);
    if random.below(4) == 0 && matches!(stored, DType::Int8 | DType::HiFloat8 | DType::Float8E4M3Fn) {
        call.output(stored, extents);
        call.plain.quant_scale2 = Some(desc(DType::Float, &[1]));
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Latent attention over compressed keys, quantised or not.
pub fn latent(seed: u64) -> Call {
    let random = &mut Random(seed);
    let stored = pick(random, &[DType::Int8, DType::Float8E4M3Fn, DType::HiFloat8, DType::Float16, DType::Bf16]);
    let quantised = !stored.is_half();
    let dtype = if quantised { DType::Bf16 } else { stored };
    let layout = pick(random, &LATENT);
    let heads = pick(random, &[1, 2, 8, 32]);
    let most_rows = pick(random, &[1, 5]);
    let mut lengths = Lengths::new(random, most_rows);
    if !layout.is_packed() {
        lengths.rows.fill(most_rows);
    }
    let [extents, keys] = lengths.extents(layout, [heads, 1, 512]);
    let mut call = new(layout, stored, extents, seed);
    call.output(dtype, extents);
    call.plain.scale = 1.0 / 192f64.sqrt();
    let paged = stored == DType::Int8 || random.below(2) == 0;
    if paged {
        let cache = pick(random, &CACHES);
        call.pages(cache, stored, [1, 128, 512, 512], &lengths.keys, random);
        let blocks = call.key[0].shape[0];
        call.plain.key_rope = Some(cached(cache, dtype, [blocks, 1, 128, 64]));
    } else {
        call.keys(stored, keys, 512);
        call.plain.key_rope = Some(rope(layout, dtype, keys));
    }
    call.plain.query_rope = Some(rope(layout, dtype, extents));
    lengths.tell(&mut call, paged, random);
    if quantised && !layout.is_packed() {
        call.q_lens = None;
    }
    if lengths.most().0 > 1 {
        call.masked(SparseMode::RightDownCausal);
    }
    if quantised {
        let shape = match layout.input().shape(extents)[..] {
            [rows, heads, _] if layout.is_packed() => vec![rows, heads],
            [batch, rows, _] => vec![batch, rows, heads],
            [a, b, c, _] => vec![a, b, c],
            _ => vec![],
        };
        call.plain.dequant_scale_query = Some(desc(DType::Float, &shape));
        call.plain.key_antiquant_scale = Some(desc(DType::Float, &[1]));
        call.plain.value_antiquant_scale = Some(desc(DType::Float, &[1]));
        call.plain.query_quant_mode = 3;
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Query, keys and values of E4M3 in groups of 32 with a shared exponent.
pub fn mxfp8(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let layout = Layout::Tnd;
    let dim = pick(random, &[64, 128]);
    let stored = DType::Float8E4M3Fn;
    let lengths = Lengths::new(random, 200);
    let [extents, keys] = lengths.extents(layout, [heads, kv_heads, dim]);
    let mut call = new(layout, stored, extents, seed);
    let with_rope = random.below(2) == 0;
    let out = match with_rope {
        true => DType::Bf16,
        false => pick(random, &HALVES),
    };
    call.output(out, extents);
    let paged = random.below(2) == 0;
    let pairs = dim / 64;
    let e8m0 = |shape: &[i64]| desc(DType::Float8E8M0, shape);
    let (key, value) = if paged {
        let cache = pick(random, &[Cache::BnNBsD, Cache::Nz]);
        let bs = 512;
        call.pages(cache, stored, [kv_heads, bs, dim, dim], &lengths.keys, random);
        let blocks = call.key[0].shape[0];
        let rope = cached(cache, DType::Bf16, [blocks, kv_heads, bs, 64]);
        call.plain.key_rope = with_rope.then_some(rope);
        match cache {
            Cache::Nz => {
                (e8m0(&[blocks, kv_heads, bs / 16, pairs, 16, 2]), e8m0(&[blocks, kv_heads, dim / 16, bs / 64, 16, 2]))
            }
            _ => (e8m0(&[blocks, kv_heads, bs, pairs, 2]), e8m0(&[blocks, kv_heads, bs / 64, dim, 2])),
        }
    } else {
        call.keys(stored, keys, dim);
        call.plain.key_rope = with_rope.then(|| rope(layout, DType::Bf16, keys));
        let groups = lengths.keys.iter().map(|keys| (keys + 63) / 64).sum();
        (e8m0(&[keys.rows, kv_heads, pairs, 2]), e8m0(&[groups, kv_heads, dim, 2]))
    };
    call.plain.query_rope = with_rope.then(|| rope(layout, DType::Bf16, extents));
    lengths.tell(&mut call, paged, random);
    let query = match random.below(2) {
        0 => e8m0(&[extents.rows, heads, pairs, 2]),
        _ => e8m0(&[kv_heads, extents.rows, heads / kv_heads, pairs, 2]),
    };
    for (parameter, scale) in [
        (Parameter::DequantScaleQuery, query),
        (Parameter::KeyAntiquantScale, key),
        (Parameter::ValueAntiquantScale, value),
    ] {
        // Elements are some tens in size.
        let bytes = (0..scale.elements().unwrap()).map(|_| 119 + random.below(5) as u8);
        call.contents.push((parameter.into(), bytes.collect()));
    }
    call.plain.dequant_scale_query = Some(query);
    call.plain.key_antiquant_scale = Some(key);
    call.plain.value_antiquant_scale = Some(value);
    (call.plain.query_quant_mode, call.plain.key_antiquant_mode) = (6, 6);
    call.plain.value_antiquant_mode = 8;
    call.plain.quant_scale1 = (random.below(2) == 0).then(|| desc(DType::Float, &[1]));
    if random.below(2) == 0 {
        call.masked(SparseMode::RightDownCausal);
    }
    if random.below(2) == 0 {
        call.lse(extents);
    }
    call
}

/// Query, keys and values of E4M3 with a scale for each row and head, which 9.2 adds.
pub fn fp8(seed: u64) -> Call {
    let random = &mut Random(seed);
    let (heads, kv_heads) = pick(random, &HEADS);
    let (layout, stored, dim, bs) = (Layout::NtdTnd, DType::Float8E4M3Fn, 128, 128);
    let lengths = Lengths::new(random, 200);
    let [of, _] = lengths.extents(layout, [heads, kv_heads, dim]);
    let mut call = new(layout, stored, of, seed);
    call.target.cann = Cann::V9_2;
    call.output(pick(random, &HALVES), of);
    let sizes = [kv_heads, bs, dim, dim];
    call.pages(Cache::BnNBsD, stored, sizes, &lengths.keys, random);
    lengths.tell(&mut call, true, random);
    let blocks = call.key[0].shape[0];
    call.plain.dequant_scale_query = Some(desc(DType::Float, &[heads, of.rows]));
    call.plain.key_antiquant_scale = Some(desc(DType::Float, &[blocks, kv_heads, bs]));
    call.plain.value_antiquant_scale = Some(desc(DType::Float, &[kv_heads]));
    (call.plain.query_quant_mode, call.plain.key_antiquant_mode) = (3, 3);
    call.plain.value_antiquant_mode = 2;
    call.plain.inner_precise = random.below(2) as i64;
    if random.below(2) == 0 {
        call.masked(SparseMode::RightDownCausal);
    }
    if random.below(2) == 0 {
        call.lse(of);
    }
    call
}
