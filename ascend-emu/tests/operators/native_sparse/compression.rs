//! Blocks of tokens that become one token.

use super::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::aclIntArray;
use proptest::prelude::*;
use std::ffi::c_char;
use std::ptr::null_mut;

/// A random call of either operator.
#[derive(Clone, Debug)]
struct Draw {
    kind: Kind,
    lengths: Vec<usize>,
    block: usize,
    stride: usize,
    heads: usize,
    dim: usize,
    /// Tokens of a page, where tokens are in a paged cache.
    page: Option<usize>,
    seed: u64,
}

fn draws() -> impl Strategy<Value = Draw> {
    let lengths = prop::collection::vec(0usize..200, 1..5);
    let sizes = (1usize..5, 1usize..5, 1usize..4, 1usize..4);
    let page = prop_oneof![Just(None), Just(Some(64usize)), Just(Some(128))];
    (any::<bool>(), lengths, sizes, page, any::<u64>()).prop_map(
        |(bf16, mut lengths, (block, stride, heads, dim), page, seed)| {
            let (block, stride) = (16 * block, 16 * stride.min(block));
            // The newest token of the first sequence completes a block.
            lengths[0] = block + lengths[0] / stride * stride;
            Draw { kind: Kind { bf16 }, lengths, block, stride, heads, dim: 16 * dim, page, seed }
        },
    )
}

fn ints(values: &[i64]) -> *mut aclIntArray {
    unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) }
}

impl Draw {
    fn batch(&self) -> usize {
        self.lengths.len()
    }

    /// Elements of a token.
    fn token(&self) -> usize {
        self.heads * self.dim
    }

    fn weights(&self) -> Vec<f32> {
        numbers(self.seed ^ 7, self.block * self.heads)
    }

    /// An element of the compressed token that begins with the token of this number, whose tokens `find` finds.
    fn defined(&self, tokens: &[f32], find: &dyn Fn(usize) -> usize, element: usize) -> f64 {
        let weights = self.weights();
        let head = element / self.dim;
        let term = |at: usize| {
            f64::from(weights[at * self.heads + head]) * f64::from(tokens[find(at) * self.token() + element])
        };
        (0..self.block).map(term).sum()
    }

    /// Compresses all blocks.
    fn compress(&self) {
        let ends = self.lengths.iter().scan(0, |end, length| {
            *end += length;
            Some(*end)
        });
        let ends: Vec<usize> = ends.collect();
        let total = ends.last().copied().unwrap_or(0);
        let tokens = numbers(self.seed, total * self.token());
        let mut firsts = Vec::new();
        for (end, length) in ends.iter().zip(&self.lengths) {
            let start = end - length;
            firsts.extend((start..*end).step_by(self.stride).filter(|first| first + self.block <= *end));
        }
        let (heads, dim) = (self.heads, self.dim);
        let out = self.kind.upload(&vec![POISON; firsts.len() * self.token()]);
        let input = self.kind.tensor(&[total, heads, dim], &tokens);
        let weight = self.kind.tensor(&[self.block, heads], &self.weights());
        let output = tensor(self.kind.dtype(), &shape(&[firsts.len(), heads, dim]), out);
        let ends: Vec<i64> = ends.iter().map(|&end| end as i64).collect();
        let (mut bytes, mut executor) = (0, null_mut());
        ok(unsafe {
            aclnnNsaCompressGetWorkspaceSize(
                input,
                weight,
                ints(&ends),
                c"TND".as_ptr().cast_mut(),
                self.block as i64,
                self.stride as i64,
                0,
                output,
                &mut bytes,
                &mut executor,
            )
        });
        ok(launch(aclnnNsaCompress, (bytes, executor)));
        let got = self.kind.download(out, firsts.len() * self.token());
        for (at, got) in got.iter().enumerate() {
            let first = firsts[at / self.token()];
            let want = self.defined(&tokens, &|token| first + token, at % self.token());
            self.kind.compare(*got, want, 0.05);
        }
    }

    /// Compresses the newest blocks into a cache.
    fn step(&self) {
        let (batch, heads, dim) = (self.batch(), self.heads, self.dim);
        let columns = self.page.map_or(0, |page| 200usize.div_ceil(page) + 1);
        let (table, blocks) = table(self.seed, batch, columns);
        let first = |sequence: usize| self.lengths[..sequence].iter().sum::<usize>();
        let place = |sequence: usize, token: usize| match self.page {
            Some(page) => table[sequence * columns + token / page] as usize * page + token % page,
            None => first(sequence) + token,
        };
        let rows = self.page.map_or(first(batch), |page| blocks * page);
        let tokens = numbers(self.seed, rows * self.token());
        let slots: Vec<i32> = (0..batch).map(|sequence| ((sequence * 3 + 1) % (3 * batch)) as i32).collect();
        let cache = self.kind.upload(&vec![POISON; 3 * batch * self.token()]);
        let input = match self.page {
            Some(page) => self.kind.tensor(&[blocks, page, heads, dim], &tokens),
            None => self.kind.tensor(&[rows, heads, dim], &tokens),
        };
        let lengths: Vec<i64> = self.lengths.iter().map(|&length| length as i64).collect();
        let (mut bytes, mut executor) = (0, null_mut());
        let block_table = tensor(INT32, &shape(&[batch, columns]), upload(&[&table[..], &[0]].concat()));
        ok(unsafe {
            aclnnNsaCompressWithCacheGetWorkspaceSize(
                input,
                self.kind.tensor(&[self.block, heads], &self.weights()),
                tensor(INT32, &shape(&[batch]), upload(&slots)),
                ints(&lengths),
                if self.page.is_some() { block_table } else { null_mut() },
                c"TND".as_ptr().cast_mut(),
                self.block as i64,
                self.stride as i64,
                1,
                self.page.unwrap_or(64) as i64,
                tensor(self.kind.dtype(), &shape(&[3 * batch, heads, dim]), cache),
                &mut bytes,
                &mut executor,
            )
        });
        ok(launch(aclnnNsaCompressWithCache, (bytes, executor)));
        let got = self.kind.download(cache, 3 * batch * self.token());
        for (slot, got) in got.chunks(self.token()).enumerate() {
            let sequence = slots.iter().position(|&of| of as usize == slot);
            let complete = |sequence: &usize| {
                let length = self.lengths[*sequence];
                length >= self.block && (length - self.block).is_multiple_of(self.stride)
            };
            let Some(sequence) = sequence.filter(complete) else {
                assert!(got.iter().all(|got| (got - POISON).abs() < 2.0), "slot {slot} was written");
                continue;
            };
            let first = self.lengths[sequence] - self.block;
            for (element, got) in got.iter().enumerate() {
                let want = self.defined(&tokens, &|token| place(sequence, first + token), element);
                self.kind.compare(*got, want, 0.05);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(80))]

    #[test]
    fn blocks_become_weighted_sums(draw in draws()) {
        let _bench = Bench::new();
        draw.compress();
    }

    #[test]
    fn the_newest_block_goes_to_its_slot(draw in draws()) {
        let _bench = Bench::new();
        draw.step();
    }
}

/// Three sequences of 32, 33 and 48 tokens in a page each, of which the first and the last have a new token.
fn cached(slots: [i32; 3], table: [i32; 3], lengths: [i64; 3]) -> (i32, (u64, *mut aclOpExecutor), *mut c_void) {
    let kind = Kind { bf16: false };
    let cache = kind.upload(&[POISON; 6 * 16]);
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        aclnnNsaCompressWithCacheGetWorkspaceSize(
            kind.tensor(&[3, 64, 1, 16], &[1.0; 3 * 64 * 16]),
            kind.tensor(&[16, 1], &[0.25; 16]),
            tensor(INT32, &[3], upload(&slots)),
            ints(&lengths),
            tensor(INT32, &[3, 1], upload(&table)),
            null_mut(),
            16,
            16,
            1,
            64,
            tensor(HALF, &[6, 1, 16], cache),
            &mut bytes,
            &mut executor,
        )
    };
    (status, (bytes, executor), cache)
}

#[test]
fn slots_and_blocks_that_lead_outside_are_found_where_they_are_read() {
    let _bench = Bench::new();
    let run = |slots, table| {
        let (status, prepared, cache) = cached(slots, table, [32, 33, 48]);
        ok(status);
        (launch(aclnnNsaCompressWithCache, prepared), Kind { bf16: false }.download(cache, 6 * 16))
    };
    // The second sequence writes nothing: neither its slot nor its block counts.
    let strict = check_scope(Check::Strict);
    let (status, got) = run([4, 99, 0], [2, 77, 1]);
    ok(status);
    assert_eq!((got[0], got[16], got[4 * 16]), (4.0, 999.0, 4.0));
    drop(strict);
    for (slots, table, kind, text) in [
        ([6, 1, 0], [2, 0, 1], FindingKind::SlotOutOfRange, "slotMapping: sequence 0 writes slot 6 of 6"),
        ([4, 1, -1], [2, 0, 1], FindingKind::SlotOutOfRange, "slotMapping: sequence 2 writes slot -1"),
        ([4, 1, 4], [2, 0, 1], FindingKind::DuplicateSlot, "slotMapping: sequences 0 and 2 write slot 4"),
        ([4, 1, 0], [2, 0, 3], FindingKind::BlockTable, "blockTable: token 32 of sequence 2"),
    ] {
        let since = findings().len();
        let (status, got) = run(slots, table);
        ok(status);
        found(since, kind, text);
        // A slot that is not there is not written, and a block that is not there counts as zeros.
        let written = got.chunks(16).filter(|row| row[0] < 500.0).count();
        assert_eq!(written, if matches!(kind, FindingKind::BlockTable) { 2 } else { 1 });
        let _strict = check_scope(Check::Strict);
        assert_ne!(run(slots, table).0, 0);
    }
}

#[test]
fn calls_without_tensors_are_refused_with_their_status() {
    let _bench = Bench::new();
    let kind = Kind { bf16: false };
    let tensors = || {
        let input = kind.tensor(&[32, 1, 16], &[1.0; 32 * 16]);
        [input, kind.tensor(&[16, 1], &[1.0; 16]), kind.tensor(&[2, 1, 16], &[0.0; 32])]
    };
    let compress = |[input, weight, output]: [*mut aclTensor; 3], layout: *mut c_char, stride| unsafe {
        let (mut bytes, mut executor) = (0, null_mut());
        aclnnNsaCompressGetWorkspaceSize(
            input,
            weight,
            ints(&[32]),
            layout,
            16,
            stride,
            0,
            output,
            &mut bytes,
            &mut executor,
        )
    };
    let layout = c"TND".as_ptr().cast_mut();
    ok(compress(tensors(), layout, 16));
    let [input, weight, output] = tensors();
    fails(compress([null_mut(), weight, output], layout, 16), 161_001, &["input"]);
    fails(compress([input, weight, null_mut()], layout, 16), 161_001, &["output"]);
    fails(compress(tensors(), null_mut(), 16), 161_001, &["layout"]);
    fails(compress(tensors(), c"BSH".as_ptr().cast_mut(), 16), 161_002, &["nsa_compress.layout"]);
    fails(compress(tensors(), layout, 32), 561_103, &["nsa_compress.stride"]);
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        aclnnNsaCompressWithCacheGetWorkspaceSize(
            input,
            weight,
            null_mut(),
            ints(&[32]),
            null_mut(),
            null_mut(),
            16,
            16,
            1,
            64,
            output,
            &mut bytes,
            &mut executor,
        )
    };
    fails(status, 561_103, &["slotMapping"]);
}
