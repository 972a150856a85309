//! Whatever fails in between, every handle, byte and block of TriangleMix is given back.

#![cfg(feature = "emulation")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use ascend_attention::spec::geometry::TriangleMix;
use ascend_attention::{Stream, bf16};
use ascend_serving::{Backend, Backends, Result};
use ascend_testing::faults::{DIM, HEADS, Pools, nothing_is_left, ones, schedule, shape};
use ascend_testing::harness;
use ascend_trianglemix::{TriangleLayers, TriangleMixBackend, TrianglePrefill, TriangleThresholds};

fn steps(stream: &Stream, pools: &mut Pools) -> Result<()> {
    let triangle = TriangleMixBackend {
        layers: TriangleLayers::first(1).unwrap(),
        sizes: TriangleMix::new(4, 16, 8),
        thresholds: TriangleThresholds::ALWAYS,
    };
    schedule(stream, pools, Backends::none().with(triangle).with(Backend::Fused))
}

fn prefills(stream: &Stream, _: &mut Pools) -> Result<()> {
    let prefill =
        TrianglePrefill { shape: shape(), sizes: TriangleMix::new(4, 16, 8), thresholds: TriangleThresholds::ALWAYS };
    let query = ones(stream, bf16::ONE, [90, HEADS, DIM])?;
    let key = ones(stream, bf16::ONE, [90, 1, DIM])?;
    let plan = prefill.plan(stream, (0, Some(90)), (&query, &key, &key))?;
    assert!(!plan.is_dense());
    plan.launch(stream, (&query, &key, &key))?.download(stream)?;
    Ok(())
}

#[test]
fn nothing_is_left_whatever_fails() {
    if harness::not_on_npu("failures are injected into, and leaks counted by, the emulation of this process") {
        return;
    }
    nothing_is_left(&[(steps, true), (prefills, true)]);
}
