//! Cost of making masks on the host, and of asking for one that is there: `cargo bench --bench masks`.

#![allow(clippy::unwrap_used, reason = "a benchmark fails by panicking")]

use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::spec::{MaskGeometry, SparseMode, Visibility};
use ascend_attention::{CausalOrigin, Runtime, SlidingWindow};
use divan::counter::BytesCount;
use divan::{Bencher, black_box};

fn main() {
    divan::main();
}

const SIDE: usize = 8192;
const BYTES: usize = SIDE * SIDE;

/// What the machine can do at best: the same bytes, all of one value. Memory is there already, as in the others.
#[divan::bench]
fn fill_8192x8192(bencher: Bencher<'_, '_>) {
    let mut bytes = vec![1u8; BYTES];
    bencher.counter(BytesCount::new(BYTES)).bench_local(move || black_box(&mut bytes).fill(black_box(1)));
}

fn paint(bencher: Bencher<'_, '_>, mask: impl Visibility) {
    let mut bytes = Vec::with_capacity(BYTES);
    bencher.counter(BytesCount::new(BYTES)).bench_local(move || {
        HostMask::paint(black_box(&mask), MaskForm::BOOL, black_box(&mut bytes)).unwrap();
    });
}

#[divan::bench]
fn causal_8192x8192(bencher: Bencher<'_, '_>) {
    let side = SIDE as u64;
    let mode = SparseMode::LeftUpCausal;
    paint(bencher, MaskGeometry::new(mode, true, side, side, 0, 0));
}

#[divan::bench]
fn triangle_mix_8192x8192(bencher: Bencher<'_, '_>) {
    let rows = TriangleRows::whole(SIDE as u64);
    let mask = TriangleMix::PAPER.geometry(TrianglePart::Triangle, rows);
    paint(bencher, mask);
}

/// The cache's answer when the mask is there, and the drop of it.
mod hit {
    use super::*;

    fn bench<T>(bencher: Bencher<'_, '_>, ask: impl Fn(&ascend_attention::mask::Masks<'_>) -> T) {
        let device = Runtime::emulated().unwrap().device(0).unwrap();
        let masks = device.masks();
        drop(ask(&masks));
        bencher.bench_local(|| drop(black_box(ask(black_box(&masks)))));
    }

    #[divan::bench]
    fn causal(bencher: Bencher<'_, '_>) {
        bench(bencher, |masks| masks.causal(CausalOrigin::RightDown).unwrap());
    }

    #[divan::bench]
    fn sliding_window(bencher: Bencher<'_, '_>) {
        let window = SlidingWindow::new(512).unwrap();
        bench(bencher, |masks| masks.sliding_window(window).unwrap());
    }

    #[divan::bench]
    fn causal_full(bencher: Bencher<'_, '_>) {
        let right = CausalOrigin::RightDown;
        bench(bencher, |masks| masks.causal_full(right, 100, 512).unwrap());
    }

    #[divan::bench]
    fn geometry(bencher: Bencher<'_, '_>) {
        let rows = TriangleRows::whole(1024);
        let triangle = TriangleMix::PAPER.geometry(TrianglePart::Triangle, rows);
        bench(bencher, |masks| masks.geometry(triangle).unwrap());
    }
}
