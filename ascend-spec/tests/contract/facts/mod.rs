//! What is known of each release, one probing call a fact, with the verdicts of 8.1, 8.5, 9.0 and 9.1 on Atlas A2 as
//! four letters: `a` accepted, `r` refused, `-` not said or not to be expressed there.
//!
//! Where a fact has two classes of head dimension, the first letters are those of 64, the others those of 96.

mod ascend950;
mod latent;
mod masks;
mod outputs;
mod packed;
mod pages;
mod plain;
mod quantised;
mod sinks;

use crate::described::of;
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};

use ascend_spec::{Cann, DType, Dims, Extents, Layout, Soc, Target, TensorDesc};

type Call = FiaCall<'static>;

/// A fact: what it is about, the verdicts, and the call.
type Fact = (&'static str, &'static str, Call);

fn mask(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Bool, shape)
}

fn float(shape: &[i64]) -> Option<TensorDesc> {
    of(DType::Float, shape)
}

/// The triangle of the compressed modes.
fn triangle() -> Option<TensorDesc> {
    mask(&[2048, 2048])
}

/// Tests end soon: what a call borrows may live as long.
fn kept<T>(all: Vec<T>) -> &'static [T] {
    Box::leak(all.into_boxed_slice())
}

/// Cumulative ends of sequences of these lengths.
fn ends(lengths: &[i64]) -> &'static [i64] {
    let mut end = 0;
    kept(
        lengths
            .iter()
            .map(|len| {
                end += len;
                end
            })
            .collect(),
    )
}

fn with(call: &Call, change: impl FnOnce(&mut Call)) -> Call {
    let mut call = call.clone();
    change(&mut call);
    call
}

/// The sizes of a call without anything special.
#[derive(Clone, Copy)]
struct Probe {
    layout: &'static str,
    dtype: DType,
    batch: i64,
    heads: i64,
    kv_heads: i64,
    rows: i64,
    keys: i64,
    dim: i64,
    value_dim: i64,
}

/// Layout, and batch, query heads, key heads, query rows, keys, head dimension.
fn probe(layout: &'static str, sizes: [i64; 6]) -> Probe {
    let [batch, heads, kv_heads, rows, keys, dim] = sizes;
    Probe { layout, dtype: DType::Float16, batch, heads, kv_heads, rows, keys, dim, value_dim: dim }
}

impl Probe {
    fn bf16(self) -> Probe {
        Probe { dtype: DType::Bf16, ..self }
    }

    fn value(self, value_dim: i64) -> Probe {
        Probe { value_dim, ..self }
    }

    fn axes(self) -> Layout {
        Layout::parse(self.layout).unwrap()
    }

    fn extents(self, heads: i64, rows: i64, dim: i64) -> Extents {
        match self.axes().is_packed() {
            true => Extents { batch: 1, heads, rows: self.batch * rows, dim },
            false => Extents { batch: self.batch, heads, rows, dim },
        }
    }

    fn input(self, heads: i64, rows: i64, dim: i64) -> TensorDesc {
        let shape = self.axes().input().shape(self.extents(heads, rows, dim));
        TensorDesc::packed(self.dtype, shape)
    }

    /// Dense keys.
    fn call(self) -> Call {
        let packed = self.axes().is_packed();
        let all = |len: i64| ends(&vec![len; self.batch as usize]);
        let out = self.axes().out_shape(self.extents(self.heads, self.rows, self.value_dim));
        FiaCall {
            query: Some(self.input(self.heads, self.rows, self.dim)),
            key: kept(vec![self.input(self.kv_heads, self.keys, self.dim)]),
            value: kept(vec![self.input(self.kv_heads, self.keys, self.value_dim)]),
            num_heads: self.heads,
            num_key_value_heads: self.kv_heads,
            actual_seq_lengths: packed.then(|| all(self.rows)),
            actual_seq_lengths_kv: packed.then(|| all(self.keys)),
            attention_out: Some(TensorDesc::packed(self.dtype, out)),
            ..FiaCall::new(self.layout)
        }
    }

    /// A cache of blocks: of 3 axes BnBsH, of 4 BnNBsD, of 5 NZ. The table has a block more than there are keys.
    fn paged(self, bs: i64, axes: usize) -> Call {
        let columns = self.keys / bs + 1 + i64::from(self.keys % bs != 0);
        let blocks = self.batch * columns;
        FiaCall {
            key: kept(vec![self.cache(blocks, bs, axes, self.dim)]),
            value: kept(vec![self.cache(blocks, bs, axes, self.value_dim)]),
            block_table: of(DType::Int32, &[self.batch, columns]),
            block_size: bs,
            actual_seq_lengths_kv: Some(kept(vec![self.keys; self.batch as usize])),
            ..self.call()
        }
    }

    fn cache(self, blocks: i64, bs: i64, axes: usize, dim: i64) -> TensorDesc {
        let (n, run) = (self.kv_heads, 256 / i64::from(self.dtype.bits()));
        let shape = match axes {
            3 => Dims::of([blocks, bs, n * dim]),
            4 => Dims::of([blocks, n, bs, dim]),
            _ => Dims::of([blocks, n, dim / run, bs, run]),
        };
        TensorDesc::packed(self.dtype, shape)
    }

    /// A list of keys and values, one tensor a sequence.
    fn list(self) -> Call {
        let one = Probe { batch: 1, ..self };
        let all = |dim| kept(vec![one.input(self.kv_heads, self.keys, dim); self.batch as usize]);
        FiaCall { key: all(self.dim), value: all(self.value_dim), ..self.call() }
    }

    /// Rotary parts beside dense keys.
    fn rope(self) -> Call {
        FiaCall {
            query_rope: Some(self.input(self.heads, self.rows, 64)),
            key_rope: Some(self.input(self.kv_heads, self.keys, 64)),
            ..self.call()
        }
    }

    /// Rotary parts beside a cache.
    fn paged_rope(self, bs: i64, axes: usize) -> Call {
        let call = self.paged(bs, axes);
        let blocks = call.key[0].shape[0];
        FiaCall {
            query_rope: Some(self.input(self.heads, self.rows, 64)),
            key_rope: Some(self.cache(blocks, bs, axes, 64)),
            ..call
        }
    }

    /// With a log-sum-exp.
    fn lse(self) -> Option<TensorDesc> {
        let shape = self.axes().lse_shape(self.extents(self.heads, self.rows, 1));
        Some(TensorDesc::packed(DType::Float, shape))
    }
}

/// `a`, `r`, or why a call is neither.
fn verdict(call: &Call, target: Target) -> Result<char, String> {
    let oldest = Version::oldest_for(call).max(Version::V4);
    let version = match target.soc {
        Soc::Ascend950 => Version::V5,
        _ => oldest,
    };
    match call.check(version, target) {
        Ok(_) => Ok('a'),
        Err(violation) if violation.is_unsupported() => Ok('a'),
        Err(violation) => {
            let rule = violation.rule;
            match rule.id {
                "call.product" => Err(violation.to_string()),
                _ => Ok('r'),
            }
        }
    }
}

fn refusal(call: &Call, target: Target) -> String {
    let version = match target.soc {
        Soc::Ascend950 => Version::V5,
        _ => Version::oldest_for(call).max(Version::V4),
    };
    match call.check(version, target) {
        Ok(_) => "accepted".to_owned(),
        Err(refusal) => refusal.to_string(),
    }
}

/// Every fact holds, on Atlas A2 and on A3.
#[track_caller]
fn hold(facts: &[Fact]) {
    let mut wrong = Vec::new();
    for (about, letters, call) in facts {
        assert_eq!(letters.len(), 4, "{about}");
        for (letter, cann) in letters.chars().zip(Cann::ALL) {
            if letter == '-' {
                continue;
            }
            for soc in [Soc::AtlasA2, Soc::AtlasA3] {
                let target = Target::new(soc, cann);
                if verdict(call, target) != Ok(letter) {
                    wrong.push(format!("{about} ({cann} {letter}): {}", refusal(call, target)));
                    break;
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Facts that hold for 64 and for 96 channels a head, with the letters of each.
#[track_caller]
fn hold_for_both(facts: impl Fn(i64) -> Vec<(&'static str, [&'static str; 2], Call)>) {
    for (class, dim) in [64, 96].into_iter().enumerate() {
        let facts: Vec<Fact> =
            facts(dim).into_iter().map(|(about, letters, call)| (about, letters[class], call)).collect();
        hold(&facts);
    }
}
