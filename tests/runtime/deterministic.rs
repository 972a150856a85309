//! Deterministic operators: an option of the device, kept by what is planned, that makes the bits of an attention row
//! depend on the row alone.

use ascend_attention::spec::{Cann, Soc};
use ascend_attention::{CausalOrigin, Device, FusedInferAttention, InnerPrecise, Layout, Stream, Tensor, bf16, f16};
use proptest::prelude::*;

use crate::harness;
use crate::harness::reference::Half;

/// A device that no other test asks for anything: the option counts for all who share it.
fn device() -> Device {
    harness::emulated_stream(Soc::AtlasA3, Cann::V9_1).device().clone()
}

/// Rows of a causal prompt: batches of `[query heads, rows, D]` over `[key heads, keys, D]`.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    kv_heads: usize,
    group: usize,
    rows: usize,
    keys: usize,
    dim: usize,
    seed: u64,
}

/// Bits of the attention and of the log-sum-exp.
type Bits = (Vec<u64>, Vec<u32>);

impl Prompt {
    /// The rows from `first` to `end`, in a batch of `batch` times the same.
    fn bits<T: Half>(&self, stream: &Stream, first: usize, end: usize, batch: usize) -> Vec<Bits> {
        let (heads, rows) = (self.kv_heads * self.group, end - first);
        let seen = self.keys + end - self.rows;
        let tensor = |what: u64, heads: usize, all: usize, first: usize, rows: usize| -> Tensor<T> {
            let numbers = harness::numbers(self.seed + what, heads * all * self.dim);
            let of_head = |head: usize| {
                let row = |row: usize| (head * all + row) * self.dim;
                numbers[row(first)..row(first + rows)].iter().map(|number| T::from_f32(*number))
            };
            let once: Vec<T> = (0..heads).flat_map(of_head).collect();
            stream.upload(&once.repeat(batch), [batch, heads, rows, self.dim]).unwrap()
        };
        let query = tensor(1, heads, self.rows, first, rows);
        let [key, value] = [2, 3].map(|what| tensor(what, self.kv_heads, self.keys, 0, seen));
        let call = FusedInferAttention::new(Layout::Bnsd).heads(heads).kv_heads(self.kv_heads).softmax_lse(true);
        let call = call.scale(1.0 / (self.dim as f64).sqrt()).inner_precise(InnerPrecise::HighPrecision);
        let call = match rows {
            1 => call,
            _ => call.mask(stream.device().masks().causal(CausalOrigin::RightDown).unwrap()),
        };
        let plan = call.plan((&query, &key, &value)).unwrap();
        let output = plan.launch(stream, (&query, &key, &value)).unwrap();
        let attention = output.attention.download(stream).unwrap();
        let lse = output.softmax_lse.unwrap().download(stream).unwrap();
        let attention: Vec<u64> = attention.iter().map(|number| number.to_f64().to_bits()).collect();
        let lse: Vec<u32> = lse.iter().map(|number| number.to_bits()).collect();
        let each = attention.chunks(heads * rows * self.dim).zip(lse.chunks(heads * rows));
        each.map(|(attention, lse)| (attention.to_vec(), lse.to_vec())).collect()
    }

    /// The same rows of a whole prompt's bits.
    fn part(&self, (attention, lse): &Bits, first: usize, end: usize) -> Bits {
        let heads = self.kv_heads * self.group;
        let rows = |head: usize, size: usize| (head * self.rows + first) * size..(head * self.rows + end) * size;
        let of_attention = (0..heads).flat_map(|head| attention[rows(head, self.dim)].iter().copied());
        let of_lse = (0..heads).flat_map(|head| lse[rows(head, 1)].iter().copied());
        (of_attention.collect(), of_lse.collect())
    }

    /// Whether every chunk, in a batch of two, has the bits of the whole prompt.
    fn keeps_bits<T: Half>(&self, stream: &Stream, chunk: usize) -> bool {
        let whole = &self.bits::<T>(stream, 0, self.rows, 1)[0];
        (0..self.rows).step_by(chunk).all(|first| {
            let end = self.rows.min(first + chunk);
            let part = self.part(whole, first, end);
            self.bits::<T>(stream, first, end, 2).iter().all(|bits| *bits == part)
        })
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn chunks_and_batches_change_no_bit(
        (kv_heads, group) in prop::sample::select(vec![(1, 1), (2, 1), (1, 4), (2, 5), (1, 12)]),
        rows in 1usize..40,
        before in 0usize..400,
        dim in prop::sample::select(vec![16usize, 64, 80, 128]),
        chunk in 1usize..20,
        half: bool,
        seed: u64,
    ) {
        let prompt = Prompt { kv_heads, group, rows, keys: before + rows, dim, seed: seed >> 8 };
        let device = device();
        device.set_deterministic(true).unwrap();
        let stream = device.stream().unwrap();
        let same = match half {
            true => prompt.keeps_bits::<f16>(&stream, chunk),
            false => prompt.keeps_bits::<bf16>(&stream, chunk),
        };
        prop_assert!(same, "{prompt:?}");
    }
}

/// More keys than one task computes; and the same comparison sees what the option changes.
#[test]
fn long_contexts_keep_their_bits_too() {
    let prompt = Prompt { kv_heads: 1, group: 4, rows: 3, keys: 7001, dim: 64, seed: 5 };
    let device = device();
    device.set_deterministic(true).unwrap();
    assert!(prompt.keeps_bits::<bf16>(&device.stream().unwrap(), 1));
    let other = harness::emulated_stream(Soc::AtlasA3, Cann::V9_0);
    assert!(!other.device().is_deterministic().unwrap());
    assert!(!prompt.keeps_bits::<bf16>(&other, 1));
}

#[test]
fn the_option_is_the_devices_and_can_be_taken_back() {
    let stream = harness::emulated_stream(Soc::AtlasA3, Cann::V8_5);
    let device = stream.device();
    assert!(!device.is_deterministic().unwrap() && !device.is_batch_invariant().unwrap());
    for on in [true, true, false, true] {
        device.set_deterministic(on).unwrap();
        let again = device.runtime().device(0).unwrap();
        assert_eq!((again.is_deterministic().unwrap(), again.is_batch_invariant().unwrap()), (on, on));
    }
    let other = harness::emulated_stream(Soc::AtlasA2, Cann::V8_5);
    assert!(!other.device().is_deterministic().unwrap());
}

/// A plan keeps what held when it was made.
#[test]
fn plans_keep_what_they_were_made_with() {
    let stream = harness::emulated_stream(Soc::AtlasA2, Cann::V9_0);
    let device = stream.device();
    let numbers = |count: usize, seed| harness::halves(seed, count);
    let query = stream.upload(&numbers(2 * 64, 1), [1, 2, 1, 64]).unwrap();
    let key = stream.upload(&numbers(2 * 5000 * 64, 2), [1, 2, 5000, 64]).unwrap();
    let plan = || FusedInferAttention::new(Layout::Bnsd).heads(2).scale(0.125).plan((&query, &key, &key)).unwrap();
    let usual = plan();
    device.set_deterministic(true).unwrap();
    let deterministic = plan();
    let bits = |plan: &ascend_attention::Plan| {
        let output = plan.launch(&stream, (&query, &key, &key)).unwrap();
        output.attention.download(&stream).unwrap().into_iter().map(f16::to_bits).collect::<Vec<_>>()
    };
    let (one, other) = (bits(&usual), bits(&deterministic));
    device.set_deterministic(false).unwrap();
    assert_eq!((bits(&usual), bits(&deterministic)), (one.clone(), other.clone()));
    assert_eq!(bits(&plan()), one);
    assert_ne!(one, other, "a long decode step is split otherwise");
}
