//! The operator's attributes and length arrays, as text and as numbers.

use std::collections::BTreeMap;

use ascend_spec::fia::FiaCall;

use super::error::CaseError;

macro_rules! attributes {
    ($($(#[$doc:meta])* $field:ident = $default:expr;)*) => {
        /// Attributes and length arrays of one call. [`Attributes::default`] has the operator's defaults.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Attributes {
            /// Axis orders, as CANN spells them.
            pub input_layout: String,
            /// Factor of the scores (`scaleValue`).
            pub scale: f64,
            /// Whether the log-sum-exp is written.
            pub softmax_lse_flag: bool,
            $($(#[$doc])* pub $field: i64,)*
            /// Query lengths; `None` is a null pointer.
            pub actual_seq_lengths: Option<Vec<i64>>,
            /// Key and value lengths; `None` is a null pointer.
            pub actual_seq_lengths_kv: Option<Vec<i64>>,
            /// Valid length of the shared prefix; `None` is a null pointer.
            pub actual_shared_prefix_len: Option<Vec<i64>>,
            /// First position of the queries; `None` is a null pointer.
            pub q_start_idx: Option<Vec<i64>>,
            /// First position of the keys; `None` is a null pointer.
            pub kv_start_idx: Option<Vec<i64>>,
        }

        impl Default for Attributes {
            fn default() -> Self {
                Self {
                    input_layout: "BSH".to_owned(),
                    scale: 1.0,
                    softmax_lse_flag: false,
                    $($field: $default,)*
                    actual_seq_lengths: None,
                    actual_seq_lengths_kv: None,
                    actual_shared_prefix_len: None,
                    q_start_idx: None,
                    kv_start_idx: None,
                }
            }
        }

        impl Attributes {
            /// Takes over a metadata entry; false if its key is no attribute.
            pub(super) fn read(&mut self, key: &str, value: &str) -> Result<bool, CaseError> {
                match key {
                    "input_layout" => self.input_layout = value.to_owned(),
                    "scale" => self.scale = number("scale", value)?,
                    "softmax_lse_flag" => self.softmax_lse_flag = flag("softmax_lse_flag", value)?,
                    $(stringify!($field) => self.$field = integer(stringify!($field), value)?,)*
                    _ => {
                        let arrays = self.arrays_mut();
                        let Some((key, array)) = arrays.into_iter().find(|(name, _)| *name == key)
                        else {
                            return Ok(false);
                        };
                        *array = Some(list(key, value)?);
                    }
                }
                Ok(true)
            }

            /// Adds the metadata entries that [`Attributes::read`] makes these attributes of.
            pub(super) fn write(&self, metadata: &mut BTreeMap<&str, String>) {
                metadata.insert("input_layout", self.input_layout.clone());
                metadata.insert("scale", format!("{:?}", self.scale));
                metadata.insert("softmax_lse_flag", self.softmax_lse_flag.to_string());
                $(metadata.insert(stringify!($field), self.$field.to_string());)*
                if self.pse_type == 0 {
                    // Readers of earlier releases do not know it.
                    metadata.remove("pse_type");
                }
                for (key, values) in self.arrays() {
                    if let Some(values) = values {
                        metadata.insert(key, format!("{values:?}"));
                    }
                }
            }

            /// The attributes and arrays of a call.
            pub(crate) fn of(call: &FiaCall<'_>) -> Self {
                let owned = |array: Option<&[i64]>| array.map(<[i64]>::to_vec);
                Self {
                    input_layout: call.input_layout.to_owned(),
                    scale: call.scale,
                    softmax_lse_flag: call.softmax_lse_flag,
                    $($field: call.$field,)*
                    actual_seq_lengths: owned(call.actual_seq_lengths),
                    actual_seq_lengths_kv: owned(call.actual_seq_lengths_kv),
                    actual_shared_prefix_len: owned(call.actual_shared_prefix_len),
                    q_start_idx: owned(call.q_start_idx),
                    kv_start_idx: owned(call.kv_start_idx),
                }
            }

            /// The arrays by name.
            pub(super) fn arrays(&self) -> [(&'static str, &Option<Vec<i64>>); 5] {
                [
                    ("actual_seq_lengths", &self.actual_seq_lengths),
                    ("actual_seq_lengths_kv", &self.actual_seq_lengths_kv),
                    ("actual_shared_prefix_len", &self.actual_shared_prefix_len),
                    ("q_start_idx", &self.q_start_idx),
                    ("kv_start_idx", &self.kv_start_idx),
                ]
            }

            fn arrays_mut(&mut self) -> [(&'static str, &mut Option<Vec<i64>>); 5] {
                [
                    ("actual_seq_lengths", &mut self.actual_seq_lengths),
                    ("actual_seq_lengths_kv", &mut self.actual_seq_lengths_kv),
                    ("actual_shared_prefix_len", &mut self.actual_shared_prefix_len),
                    ("q_start_idx", &mut self.q_start_idx),
                    ("kv_start_idx", &mut self.kv_start_idx),
                ]
            }

            /// Sets the attributes of a call without tensors.
            pub(crate) fn call(&self) -> FiaCall<'_> {
                let mut call = FiaCall::new(&self.input_layout);
                call.scale = self.scale;
                call.softmax_lse_flag = self.softmax_lse_flag;
                $(call.$field = self.$field;)*
                call.actual_seq_lengths = self.actual_seq_lengths.as_deref();
                call.actual_seq_lengths_kv = self.actual_seq_lengths_kv.as_deref();
                call.actual_shared_prefix_len = self.actual_shared_prefix_len.as_deref();
                call.q_start_idx = self.q_start_idx.as_deref();
                call.kv_start_idx = self.kv_start_idx.as_deref();
                call
            }
        }
    };
}

attributes! {
    /// Number of query heads.
    num_heads = 1;
    /// Number of key and value heads; 0 means `num_heads`.
    num_key_value_heads = 0;
    /// Meaning of mask and tokens.
    sparse_mode = 0;
    /// Keys visible before the diagonal.
    pre_tokens = FiaCall::ALL_TOKENS;
    /// Keys visible after the diagonal.
    next_tokens = FiaCall::ALL_TOKENS;
    /// Precision (bit 0) and correction of rows without visible keys (bit 1). The operator's default is 1.
    inner_precise = 1;
    /// Tokens in a block of a paged cache.
    block_size = 0;
    /// Kind of antiquantisation of key and value together.
    antiquant_mode = 0;
    /// Kind of antiquantisation of the key.
    key_antiquant_mode = 0;
    /// Kind of antiquantisation of the value.
    value_antiquant_mode = 0;
    /// Kind of quantisation of the query.
    query_quant_mode = 0;
    /// Kind of position bias.
    pse_type = 0;
}

pub(super) fn integer(key: &'static str, value: &str) -> Result<i64, CaseError> {
    value
        .parse()
        .map_err(|_| CaseError::malformed(key, value, "a decimal integer of 64 bits"))
}

pub(super) fn number(key: &'static str, value: &str) -> Result<f64, CaseError> {
    let parsed: Option<f64> = value.parse().ok();
    parsed
        .filter(|number| number.is_finite())
        .ok_or_else(|| CaseError::malformed(key, value, "a finite decimal number"))
}

fn flag(key: &'static str, value: &str) -> Result<bool, CaseError> {
    value
        .parse()
        .map_err(|_| CaseError::malformed(key, value, "`true` or `false`"))
}

fn list(key: &'static str, value: &str) -> Result<Vec<i64>, CaseError> {
    serde_json::from_str(value)
        .map_err(|_| CaseError::malformed(key, value, "a JSON list of integers"))
}
