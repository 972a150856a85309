//! The exact operator parameters of each kind of step, as a function table records them that stands before the
//! emulation.
//!
//! `steps` has the states of a serving step, `latent` those of multi-head latent attention and of the backends that
//! layers prefer, `calls` the kinds of attention that engines call for beside steps: vision towers, quantised caches,
//! heads of 512, products without the operator.

#![cfg(feature = "emulation")]

mod batch;
mod calls;
mod captured;
use crate::harness;
mod latent;
mod recorder;
mod releases;
mod steps;

use std::sync::{MutexGuard, PoisonError};

use ascend_attention::spec::Cann;
use ascend_attention::sys::Functions;
use ascend_attention::sys::bindings::aclDataType;
use ascend_attention::{Mask, Stream};

use recorder::{Described, Said};

/// A stream whose calls are recorded, for one test at a time.
struct Table {
    stream: Stream,
    _turn: MutexGuard<'static, ()>,
}

impl Table {
    fn new() -> Self {
        Self::of(harness::functions(), false)
    }

    /// With the packed calls of 8.1, which take few shapes.
    fn of_narrow_packed_calls() -> Option<Self> {
        Some(Self::of(harness::functions_of(Cann::V8_1)?, false))
    }

    /// On a product that the operator does not run on.
    fn of_inference_product() -> Self {
        Self::of(harness::functions(), true)
    }

    fn of(functions: Functions, inference: bool) -> Self {
        let turn = recorder::TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let runtime = recorder::runtime(functions, inference);
        recorder::take();
        Self { stream: runtime.device(0).unwrap().stream().unwrap(), _turn: turn }
    }
}

fn bf16s(shape: impl Into<Vec<i64>>) -> Described {
    (aclDataType::ACL_BF16, shape.into())
}

fn compressed() -> Option<Described> {
    Some((aclDataType::ACL_INT8, vec![2048, 2048]))
}

fn ints(shape: impl Into<Vec<i64>>) -> Described {
    (aclDataType::ACL_INT32, shape.into())
}

/// A call without anything but its tensors.
fn bare(layout: &str, query: &[i64], key: &[i64], heads: [i64; 2], scale: f64) -> Said {
    Said {
        layout: layout.to_owned(),
        query: bf16s(query),
        key: bf16s(key),
        value: bf16s(key),
        out: bf16s(query),
        mask: None,
        q_lengths: None,
        kv_lengths: None,
        table: None,
        block_size: 0,
        sparse_mode: 0,
        tokens: [Mask::ALL_TOKENS; 2],
        heads,
        scale,
        inner_precise: 0,
        lse: false,
        sink: None,
        ropes: [None, None],
        antiquant: [None, None],
        modes: [0; 4],
        others: 0,
    }
}
