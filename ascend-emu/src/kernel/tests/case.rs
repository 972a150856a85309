//! A call of the dense paths, and random calls, run by the kernels and by the oracle.

use super::calls::Call;
use super::data::Data;
use crate::kernel::simd::Level;
use ascend_spec::attention_problem::AttentionProblem;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Parameter, Version};
use ascend_spec::{DType, Dims, Extents, Layout, Soc, SparseMode, Target, TensorDesc};
use std::fmt;

/// A full mask.
#[derive(Clone)]
pub(super) struct Mask {
    pub(super) shape: Vec<i64>,
    pub(super) dtype: DType,
    pub(super) bytes: Vec<u8>,
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hidden = self.bytes.iter().filter(|&&byte| byte != 0).count();
        write!(f, "{} {:?} hiding {hidden}", self.dtype, self.shape)
    }
}

/// A call in plain words.
#[derive(Clone, Debug)]
pub(super) struct Case {
    pub(super) dtype: DType,
    pub(super) layout: Layout,
    pub(super) batch: usize,
    pub(super) kv_heads: usize,
    pub(super) group: usize,
    pub(super) rows: usize,
    /// Rows of the key tensor, or of each if there is more than one.
    pub(super) key_rows: Vec<usize>,
    pub(super) dim: usize,
    pub(super) mode: SparseMode,
    pub(super) mask: Option<Mask>,
    pub(super) tokens: (i64, i64),
    pub(super) q_lens: Option<Vec<i64>>,
    pub(super) kv_lens: Option<Vec<i64>>,
    pub(super) inner_precise: i64,
    pub(super) lse: bool,
    pub(super) scale: f64,
    /// Distance of neighbouring elements of query, key, value and outputs.
    pub(super) spread: i64,
    pub(super) seed: u64,
}

impl Case {
    /// A case, causal or not, without lengths.
    pub(super) fn plain(dtype: DType, [batch, kv_heads, group, rows, keys, dim]: [usize; 6]) -> Self {
        Case {
            dtype,
            layout: Layout::Bnsd,
            batch,
            kv_heads,
            group,
            rows,
            key_rows: vec![keys],
            dim,
            mode: SparseMode::DefaultMask,
            mask: None,
            tokens: (FiaCall::ALL_TOKENS, FiaCall::ALL_TOKENS),
            q_lens: None,
            kv_lens: None,
            inner_precise: 0,
            lse: true,
            scale: 1.0 / (dim as f64).sqrt(),
            spread: 1,
            seed: 1,
        }
    }

    pub(super) fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn extents(&self, heads: usize, rows: usize) -> Extents {
        let [batch, heads, rows, dim] = [self.batch, heads, rows, self.dim].map(|n| n as i64);
        Extents { batch, heads, rows, dim }
    }

    /// The call's descriptors in its dtype; f32 calls pass the rules as FLOAT16 ones.
    fn described_dtype(&self) -> DType {
        if self.dtype == DType::Float { DType::Float16 } else { self.dtype }
    }

    /// Calls `work` with the call and its data.
    pub(super) fn with<R>(&self, work: impl FnOnce(&AttentionProblem<'_>, &mut Data) -> R) -> R {
        let described = self.described_dtype();
        let axes = self.layout.input();
        let spread = |mut desc: TensorDesc| {
            let strides: Vec<i64> = desc.strides.iter().map(|stride| stride * self.spread).collect();
            desc.strides = Dims::new(&strides).unwrap();
            desc
        };
        let desc = |extents| spread(TensorDesc::packed(described, axes.shape(extents)));
        let query = desc(self.extents(self.heads(), self.rows));
        let list = self.key_rows.len() > 1;
        let keys: Vec<TensorDesc> = self
            .key_rows
            .iter()
            .map(|&rows| {
                let mut extents = self.extents(self.kv_heads, rows);
                if list {
                    extents.batch = 1;
                }
                desc(extents)
            })
            .collect();
        let mut call = FiaCall::new(self.layout.as_str());
        call.query = Some(query);
        (call.key, call.value) = (&keys, &keys);
        let of_out = self.extents(self.heads(), self.rows);
        let out = spread(TensorDesc::packed(described, self.layout.out_shape(of_out)));
        let lse = spread(TensorDesc::packed(DType::Float, self.layout.lse_shape(of_out)));
        call.attention_out = Some(out);
        call.softmax_lse = self.lse.then_some(lse);
        call.softmax_lse_flag = self.lse;
        call.num_heads = self.heads() as i64;
        call.num_key_value_heads = self.kv_heads as i64;
        call.sparse_mode = self.mode as i64;
        (call.pre_tokens, call.next_tokens) = self.tokens;
        call.actual_seq_lengths = self.q_lens.as_deref();
        call.actual_seq_lengths_kv = self.kv_lens.as_deref();
        call.inner_precise = self.inner_precise;
        call.scale = self.scale;
        call.atten_mask = match &self.mask {
            Some(mask) => Some(TensorDesc::packed(mask.dtype, Dims::new(&mask.shape).unwrap())),
            None if self.mode.takes_compressed_mask() => Some(TensorDesc::packed(DType::Int8, Dims::of([2048, 2048]))),
            None => None,
        };
        let checked = match call.check(Version::V3, Target::snapshot(Soc::AtlasA2)) {
            Ok(checked) => checked,
            Err(refusal) => panic!("{refusal}\n{self:?}"),
        };

        let mut data = Data::new(&checked, self.dtype, self.seed);
        if let Some(mask) = &self.mask {
            data.put(Parameter::AttenMask, mask.bytes.iter().copied());
        }
        work(&checked.problem, &mut data)
    }

    /// Runs the call and compares all of output and log-sum-exp with the oracle.
    pub(super) fn check(&self, level: Level) -> Result<(), String> {
        self.with(|problem, data| data.check(problem, level))
    }
}

/// What the kernels and the oracle do with a random call.
pub(super) trait ComputedCall {
    /// Calls `work` with the call and its data; the tensors of the query's type have elements of type `held`.
    fn with<R>(&self, held: Option<DType>, work: impl FnOnce(&AttentionProblem<'_>, &mut Data) -> R) -> R;

    /// Runs the call and compares all of output and log-sum-exp with the oracle.
    fn check(&self, held: Option<DType>, level: Level) -> Result<(), String>;
}

impl ComputedCall for Call {
    fn with<R>(&self, held: Option<DType>, work: impl FnOnce(&AttentionProblem<'_>, &mut Data) -> R) -> R {
        let call = self.describe();
        let checked = match call.check(self.version, self.target) {
            Ok(checked) => checked,
            Err(refusal) => panic!("{refusal}\n{self:?}"),
        };
        let held = held.unwrap_or(checked.problem.dtype());
        let mut data = Data::new(&checked, held, self.seed);
        for (argument, bytes) in &self.contents {
            data.put(*argument, bytes.iter().copied());
        }
        work(&checked.problem, &mut data)
    }

    fn check(&self, held: Option<DType>, level: Level) -> Result<(), String> {
        self.with(held, |problem, data| data.check(problem, level))
    }
}
