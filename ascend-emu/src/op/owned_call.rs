//! A call of FusedInferAttentionScore that owns its lists, so that an executor can keep it.

use ascend_spec::TensorDesc;
use ascend_spec::fia::FiaCall;

/// Tensors of a call by their place among the operator's inputs. Places of lists and arrays stay empty.
pub(crate) type Inputs<T> = [Option<T>; crate::operator::INPUTS];

/// Places of the operator's inputs.
pub(crate) mod place {
    pub(crate) const QUERY: usize = 0;
    pub(crate) const KEY: usize = 1;
    pub(crate) const VALUE: usize = 2;
    pub(crate) const PSE_SHIFT: usize = 3;
    pub(crate) const ATTEN_MASK: usize = 4;
    pub(crate) const DEQ_SCALE1: usize = 7;
    pub(crate) const QUANT_SCALE1: usize = 8;
    pub(crate) const DEQ_SCALE2: usize = 9;
    pub(crate) const QUANT_SCALE2: usize = 10;
    pub(crate) const QUANT_OFFSET2: usize = 11;
    pub(crate) const ANTIQUANT_SCALE: usize = 12;
    pub(crate) const ANTIQUANT_OFFSET: usize = 13;
    pub(crate) const BLOCK_TABLE: usize = 14;
    pub(crate) const QUERY_PADDING_SIZE: usize = 15;
    pub(crate) const KV_PADDING_SIZE: usize = 16;
    pub(crate) const KEY_ANTIQUANT_SCALE: usize = 17;
    pub(crate) const KEY_ANTIQUANT_OFFSET: usize = 18;
    pub(crate) const VALUE_ANTIQUANT_SCALE: usize = 19;
    pub(crate) const VALUE_ANTIQUANT_OFFSET: usize = 20;
    pub(crate) const KEY_SHARED_PREFIX: usize = 21;
    pub(crate) const VALUE_SHARED_PREFIX: usize = 22;
    pub(crate) const QUERY_ROPE: usize = 24;
    pub(crate) const KEY_ROPE: usize = 25;
    pub(crate) const KEY_ROPE_ANTIQUANT_SCALE: usize = 26;
    pub(crate) const DEQUANT_SCALE_QUERY: usize = 27;
    pub(crate) const LEARNABLE_SINK: usize = 28;

    pub(crate) const ATTENTION_OUT: usize = 0;
    pub(crate) const SOFTMAX_LSE: usize = 1;
}

/// Numbers of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attributes {
    pub num_heads: i64,
    pub scale: f64,
    pub pre_tokens: i64,
    pub next_tokens: i64,
    pub num_key_value_heads: i64,
    pub sparse_mode: i64,
    pub inner_precise: i64,
    pub block_size: i64,
    pub antiquant_mode: i64,
    pub softmax_lse_flag: bool,
    pub key_antiquant_mode: i64,
    pub value_antiquant_mode: i64,
    pub query_quant_mode: i64,
    pub pse_type: i64,
}

/// A call.
#[derive(Clone, Debug)]
pub(crate) struct OwnedCall {
    pub inputs: Inputs<TensorDesc>,
    pub key: Vec<TensorDesc>,
    pub value: Vec<TensorDesc>,
    pub outputs: [Option<TensorDesc>; crate::operator::OUTPUTS],
    pub actual_seq_lengths: Option<Vec<i64>>,
    pub actual_seq_lengths_kv: Option<Vec<i64>>,
    pub actual_shared_prefix_len: Option<Vec<i64>>,
    pub q_start_idx: Option<Vec<i64>>,
    pub kv_start_idx: Option<Vec<i64>>,
    pub input_layout: String,
    pub attributes: Attributes,
}

impl OwnedCall {
    fn input(&self, place: usize) -> Option<TensorDesc> {
        self.inputs.get(place).copied().flatten()
    }

    /// The call as the contract describes it.
    pub(crate) fn borrow(&self) -> FiaCall<'_> {
        let Attributes {
            num_heads,
            scale,
            pre_tokens,
            next_tokens,
            num_key_value_heads,
            sparse_mode,
            inner_precise,
            block_size,
            antiquant_mode,
            softmax_lse_flag,
            key_antiquant_mode,
            value_antiquant_mode,
            query_quant_mode,
            pse_type,
        } = self.attributes;
        let [attention_out, softmax_lse] = self.outputs;
        FiaCall {
            query: self.input(place::QUERY),
            key: &self.key,
            value: &self.value,
            pse_shift: self.input(place::PSE_SHIFT),
            atten_mask: self.input(place::ATTEN_MASK),
            actual_seq_lengths: self.actual_seq_lengths.as_deref(),
            actual_seq_lengths_kv: self.actual_seq_lengths_kv.as_deref(),
            deq_scale1: self.input(place::DEQ_SCALE1),
            quant_scale1: self.input(place::QUANT_SCALE1),
            deq_scale2: self.input(place::DEQ_SCALE2),
            quant_scale2: self.input(place::QUANT_SCALE2),
            quant_offset2: self.input(place::QUANT_OFFSET2),
            antiquant_scale: self.input(place::ANTIQUANT_SCALE),
            antiquant_offset: self.input(place::ANTIQUANT_OFFSET),
            block_table: self.input(place::BLOCK_TABLE),
            query_padding_size: self.input(place::QUERY_PADDING_SIZE),
            kv_padding_size: self.input(place::KV_PADDING_SIZE),
            key_antiquant_scale: self.input(place::KEY_ANTIQUANT_SCALE),
            key_antiquant_offset: self.input(place::KEY_ANTIQUANT_OFFSET),
            value_antiquant_scale: self.input(place::VALUE_ANTIQUANT_SCALE),
            value_antiquant_offset: self.input(place::VALUE_ANTIQUANT_OFFSET),
            key_shared_prefix: self.input(place::KEY_SHARED_PREFIX),
            value_shared_prefix: self.input(place::VALUE_SHARED_PREFIX),
            actual_shared_prefix_len: self.actual_shared_prefix_len.as_deref(),
            query_rope: self.input(place::QUERY_ROPE),
            key_rope: self.input(place::KEY_ROPE),
            key_rope_antiquant_scale: self.input(place::KEY_ROPE_ANTIQUANT_SCALE),
            dequant_scale_query: self.input(place::DEQUANT_SCALE_QUERY),
            learnable_sink: self.input(place::LEARNABLE_SINK),
            q_start_idx: self.q_start_idx.as_deref(),
            kv_start_idx: self.kv_start_idx.as_deref(),
            num_heads,
            scale,
            pre_tokens,
            next_tokens,
            input_layout: &self.input_layout,
            num_key_value_heads,
            sparse_mode,
            inner_precise,
            block_size,
            antiquant_mode,
            softmax_lse_flag,
            key_antiquant_mode,
            value_antiquant_mode,
            query_quant_mode,
            pse_type,
            attention_out,
            softmax_lse,
        }
    }
}
