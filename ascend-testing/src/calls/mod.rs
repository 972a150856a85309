//! Random calls of every path, with the contents of the tensors that steer them: each seed is a call that the contract
//! takes. Shared by the tests of the kernels and those of the C ABI.

pub mod ascend950;
pub mod compare;
pub mod contents;
pub mod dense;
pub mod paths;
pub mod poison;
pub mod quantised;
pub mod releases;

use ascend_spec::ops::fused_infer_attention_score::{Argument, Cache, FiaCall, Parameter, Version};
use ascend_spec::{DType, Extents, Layout, Soc, SparseMode, Target, TensorDesc};

/// What a [`FiaCall`] borrows, owned, and contents that may not be random.
#[derive(Clone, Debug)]
pub struct Call {
    pub plain: FiaCall<'static>,
    pub layout: Layout,
    pub key: Vec<TensorDesc>,
    pub value: Vec<TensorDesc>,
    pub q_lens: Option<Vec<i64>>,
    pub kv_lens: Option<Vec<i64>>,
    pub prefix_len: Option<Vec<i64>>,
    pub contents: Vec<(Argument, Vec<u8>)>,
    pub seed: u64,
    /// What the call is made for.
    pub target: Target,
    pub version: Version,
}

pub fn desc(dtype: DType, shape: &[i64]) -> TensorDesc {
    TensorDesc::contiguous(dtype, shape).unwrap()
}

impl Call {
    /// Query and output of these extents, which hold the packed rows where the layout packs.
    pub fn new(layout: Layout, dtype: DType, extents: Extents, seed: u64) -> Self {
        let mut plain = FiaCall::new(layout.as_str());
        plain.query = Some(TensorDesc::packed(dtype, layout.input().shape(extents)));
        plain.num_heads = extents.heads;
        plain.scale = 1.0 / (extents.dim as f64).sqrt();
        let mut call = Call {
            plain,
            layout,
            key: Vec::new(),
            value: Vec::new(),
            q_lens: None,
            kv_lens: None,
            prefix_len: None,
            contents: Vec::new(),
            seed,
            target: Target::snapshot(Soc::AtlasA2),
            version: Version::V4,
        };
        call.output(dtype, extents);
        call
    }

    /// Makes the output of these extents.
    pub fn output(&mut self, dtype: DType, extents: Extents) {
        self.plain.attention_out = Some(TensorDesc::packed(dtype, self.layout.out_shape(extents)));
    }

    /// Asks for the log-sum-exp of queries of these extents.
    pub fn lse(&mut self, extents: Extents) {
        self.plain.softmax_lse_flag = true;
        self.plain.softmax_lse = Some(TensorDesc::packed(DType::Float, self.layout.lse_shape(extents)));
    }

    /// Key and value of one tensor each.
    pub fn keys(&mut self, dtype: DType, extents: Extents, value_dim: i64) {
        let shape = |extents| TensorDesc::packed(dtype, self.layout.input().shape(extents));
        self.key = vec![shape(extents)];
        self.value = vec![shape(Extents { dim: value_dim, ..extents })];
        self.plain.num_key_value_heads = extents.heads;
    }

    /// A paged cache with blocks to spare, for sequences of these lengths, and a shuffled table with junk past its end.
    pub fn pages(
        &mut self,
        cache: Cache,
        dtype: DType,
        [heads, block_size, dim, value_dim]: [i64; 4],
        kv_lens: &[i64],
        random: &mut Random,
    ) {
        let columns = kv_lens.iter().map(|len| (len + block_size - 1) / block_size);
        let needed: i64 = columns.clone().sum();
        let width = columns.max().unwrap_or(0).max(1) + random.below(2) as i64;
        let blocks = needed.max(1) + random.below(3) as i64;
        let mut ids: Vec<i32> = (0..blocks as i32).collect();
        for last in (1..ids.len()).rev() {
            ids.swap(last, random.below(last + 1));
        }
        let mut ids = ids.into_iter();
        let mut table = Vec::new();
        for len in kv_lens {
            let used = (len + block_size - 1) / block_size;
            table.extend((0..used).map(|_| ids.next().unwrap()));
            table.extend((used..width).map(|column| if column % 2 == 0 { -1 } else { 1 << 30 }));
        }
        self.plain.block_table = Some(desc(DType::Int32, &[kv_lens.len() as i64, width]));
        self.plain.block_size = block_size;
        self.plain.num_key_value_heads = heads;
        self.kv_lens = Some(kv_lens.to_vec());
        let bytes = table.iter().flat_map(|id| id.to_le_bytes()).collect();
        self.contents.push((Parameter::BlockTable.into(), bytes));
        let cached_keys = |dim| cached(cache, dtype, [blocks, heads, block_size, dim]);
        self.key = vec![cached_keys(dim)];
        self.value = vec![cached_keys(value_dim)];
    }

    /// The compressed mask.
    pub fn masked(&mut self, mode: SparseMode) {
        self.plain.sparse_mode = mode.acl();
        let size = SparseMode::COMPRESSED_MASK_SIZE;
        self.plain.atten_mask = Some(desc(DType::Int8, &[size, size]));
    }

    /// The call as the contract describes it.
    pub fn describe(&self) -> FiaCall<'_> {
        FiaCall {
            key: &self.key,
            value: &self.value,
            actual_seq_lengths: self.q_lens.as_deref(),
            actual_seq_lengths_kv: self.kv_lens.as_deref(),
            actual_shared_prefix_len: self.prefix_len.as_deref(),
            ..self.plain.clone()
        }
    }
}

/// A paged cache of blocks, heads, tokens in a block and head dimension.
pub fn cached(cache: Cache, dtype: DType, [blocks, heads, block_size, dim]: [i64; 4]) -> TensorDesc {
    let lanes = 256 / i64::from(dtype.bits());
    match cache {
        Cache::BnBsH => desc(dtype, &[blocks, block_size, heads * dim]),
        Cache::BnNBsD => desc(dtype, &[blocks, heads, block_size, dim]),
        Cache::Nz => desc(dtype, &[blocks, heads, dim / lanes, block_size, lanes]),
    }
}

/// Numbers of a linear congruential generator, between -2 and 2, most of them small.
pub struct Random(pub u64);

impl Random {
    pub fn unit(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 24) as f32
    }

    #[allow(clippy::should_implement_trait, reason = "numbers without an end are no iterator's")]
    pub fn next(&mut self) -> f32 {
        (self.unit() + self.unit() + self.unit() + self.unit()) * 2.0 - 4.0 + self.unit() * 1e-3
    }

    pub fn below(&mut self, end: usize) -> usize {
        ((self.unit() * end as f32) as usize).min(end.saturating_sub(1))
    }
}
