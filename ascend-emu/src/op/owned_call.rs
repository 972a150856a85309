//! A call of FusedInferAttentionScore that owns its lists, so that an executor can keep it.

use ascend_spec::TensorDesc;
use ascend_spec::fia::{FiaCall, Parameter, Place, UnreadLengths};

/// Tensors of a call by their place among the operator's inputs. Places of lists and arrays stay empty.
pub(crate) type Inputs<T> = [Option<T>; crate::operator::INPUTS];

/// Places of the lists among the operator's inputs.
pub(crate) mod place {
    use ascend_spec::fia::{Operand, Place};

    pub(crate) const QUERY: usize = of(Operand::Query);
    pub(crate) const KEY: usize = of(Operand::Key(0));
    pub(crate) const VALUE: usize = of(Operand::Value(0));

    const fn of(operand: Operand) -> usize {
        match operand.place() {
            Place::Input(number, _) | Place::Output(number) => number,
        }
    }
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
    /// A tensor by its place in the argument list; those of the lists have none here.
    fn tensor(&self, place: Place) -> Option<TensorDesc> {
        match place {
            Place::Input(number, _) => self.inputs.get(number).copied().flatten(),
            Place::Output(number) => self.outputs.get(number).copied().flatten(),
        }
    }

    /// Puts stand-ins in the place of length arrays; says whether there are any.
    pub(crate) fn stand_in(&mut self, unread: UnreadLengths) -> bool {
        self.actual_seq_lengths = unread.actual_seq_lengths;
        self.actual_seq_lengths_kv = unread.actual_seq_lengths_kv;
        self.actual_shared_prefix_len = unread.actual_shared_prefix_len;
        self.actual_seq_lengths.is_some()
            || self.actual_seq_lengths_kv.is_some()
            || self.actual_shared_prefix_len.is_some()
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
        let mut call = FiaCall {
            key: &self.key,
            value: &self.value,
            actual_seq_lengths: self.actual_seq_lengths.as_deref(),
            actual_seq_lengths_kv: self.actual_seq_lengths_kv.as_deref(),
            actual_shared_prefix_len: self.actual_shared_prefix_len.as_deref(),
            q_start_idx: self.q_start_idx.as_deref(),
            kv_start_idx: self.kv_start_idx.as_deref(),
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
            ..FiaCall::new(&self.input_layout)
        };
        for parameter in Parameter::ALL {
            *parameter.of_mut(&mut call) = self.tensor(parameter.place());
        }
        call
    }
}
