//! Attention to compressed tokens and to selected blocks.

use super::*;
use ascend_emu::abi::*;
use ascend_emu::{Check, check_scope};
use ascend_sys::bindings::aclIntArray;
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::ptr::null_mut;

/// Queries and a paged cache, of random sizes.
#[derive(Clone, Debug)]
struct Draw {
    kind: Kind,
    /// Query rows and original tokens of each sequence.
    lengths: Vec<(usize, usize)>,
    packed: bool,
    kv_heads: usize,
    group: usize,
    dims: [usize; 2],
    page: usize,
    count: usize,
    select: usize,
    /// Tokens of a compressed block, and the distance of two.
    compression: [usize; 2],
    seed: u64,
}

fn draws() -> impl Strategy<Value = Draw> {
    let lengths = prop::collection::vec((1usize..5, 260usize..700), 1..4);
    let heads = (1usize..3, prop_oneof![Just(1usize), Just(2), Just(8)]);
    let sizes = (prop_oneof![Just(64usize), Just(128)], 1usize..5, 0usize..4);
    (any::<bool>(), lengths, any::<bool>(), heads, sizes, any::<u64>()).prop_map(
        |(bf16, mut lengths, packed, (kv_heads, group), (page, count, form), seed)| {
            let rows = lengths[0].0;
            if !packed {
                lengths.iter_mut().for_each(|(queries, _)| *queries = rows);
            }
            let (compression, select) = [([32, 16], 64), ([16, 16], 16), ([32, 32], 64), ([64, 16], 64)][form];
            Draw {
                kind: Kind { bf16 },
                lengths,
                packed,
                kv_heads,
                group,
                dims: [192, 128],
                page,
                count,
                select,
                compression,
                seed,
            }
        },
    )
}

fn ints(values: impl Iterator<Item = usize>) -> *mut aclIntArray {
    let values: Vec<i64> = values.map(|value| value as i64).collect();
    unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) }
}

/// A cache of the tokens of all sequences, and where they are.
struct Cache {
    table: Vec<i32>,
    columns: usize,
    blocks: usize,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl Draw {
    fn heads(&self) -> usize {
        self.kv_heads * self.group
    }

    fn rows(&self) -> usize {
        self.lengths.iter().map(|(queries, _)| queries).sum()
    }

    /// Compressed tokens of a sequence.
    fn compressed(&self, tokens: usize) -> usize {
        let [block, stride] = self.compression;
        (0..tokens).step_by(stride).filter(|first| first + block <= tokens).count()
    }

    /// Sequence and number within it of each query row.
    fn numbered(&self) -> Vec<(usize, usize)> {
        let rows = self.lengths.iter().enumerate();
        rows.flat_map(|(sequence, &(queries, _))| (0..queries).map(move |row| (sequence, row))).collect()
    }

    fn query_shape(&self, last: usize) -> Vec<usize> {
        match self.packed {
            true => vec![self.rows(), self.heads(), last],
            false => vec![self.lengths.len(), self.lengths[0].0, self.heads(), last],
        }
    }

    fn selected_shape(&self) -> Vec<usize> {
        match self.packed {
            true => vec![self.rows(), self.kv_heads, self.count],
            false => vec![self.lengths.len(), self.lengths[0].0, self.kv_heads, self.count],
        }
    }

    fn cache(&self, most: usize) -> Cache {
        let columns = most.div_ceil(self.page) + 1;
        let (table, blocks) = table(self.seed, self.lengths.len(), columns);
        let rows = blocks * self.page * self.kv_heads;
        Cache {
            table,
            columns,
            blocks,
            keys: numbers(self.seed ^ 3, rows * self.dims[0]),
            values: numbers(self.seed ^ 5, rows * self.dims[1]),
        }
    }

    /// Elements of a token of a sequence for a key head.
    fn token<'c>(&self, cache: &'c Cache, elements: &'c [f32], dim: usize, place: [usize; 3]) -> &'c [f32] {
        let [sequence, token, kv_head] = place;
        let block = cache.table[sequence * cache.columns + token / self.page] as usize;
        let row = (block * self.page + token % self.page) * self.kv_heads + kv_head;
        &elements[row * dim..][..dim]
    }

    fn scale(&self) -> f64 {
        0.2
    }

    /// The weights of tokens for a query head of a row, in the order of `tokens`.
    fn weights(&self, cache: &Cache, queries: &[f32], (row, head): (usize, usize), tokens: &[usize]) -> Vec<f64> {
        let dim = self.dims[0];
        let query = &queries[(row * self.heads() + head) * dim..][..dim];
        let sequence = self.numbered()[row].0;
        let score = |&token: &usize| {
            let key = self.token(cache, &cache.keys, dim, [sequence, token, head / self.group]);
            let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
            self.scale() * products.sum::<f64>()
        };
        let scores: Vec<f64> = tokens.iter().map(score).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - max).exp()).sum();
        scores.iter().map(|score| (score - max).exp() / sum).collect()
    }

    /// Compares attention of each row and head to the tokens that `tokens(row, key head)` returns.
    fn compare(&self, cache: &Cache, queries: &[f32], got: &[f32], tokens: &dyn Fn(usize, usize) -> Vec<usize>) {
        let dim = self.dims[1];
        for (at, got) in got.chunks(dim).enumerate() {
            let (row, head) = (at / self.heads(), at % self.heads());
            let (sequence, kv_head) = (self.numbered()[row].0, head / self.group);
            let tokens = tokens(row, kv_head);
            let weights = self.weights(cache, queries, (row, head), &tokens);
            for (element, got) in got.iter().enumerate() {
                let value = |token: usize| {
                    f64::from(self.token(cache, &cache.values, dim, [sequence, token, kv_head])[element])
                };
                let want: f64 = tokens.iter().zip(&weights).map(|(&token, weight)| weight * value(token)).sum();
                self.kind.compare(*got, want, 0.5);
            }
        }
    }

    /// Attends to compressed tokens and chooses blocks.
    fn choose(&self) {
        let compressed: Vec<usize> = self.lengths.iter().map(|&(_, tokens)| self.compressed(tokens)).collect();
        let cache = self.cache(compressed.iter().copied().max().unwrap());
        let queries = numbers(self.seed ^ 9, self.rows() * self.heads() * self.dims[0]);
        let (out, selected) = (
            self.kind.upload(&vec![POISON; self.rows() * self.heads() * self.dims[1]]),
            upload(&vec![77i32; self.rows() * self.kv_heads * self.count]),
        );
        let [block, stride] = self.compression;
        let paged = |of: &[f32], dim: usize| self.kind.tensor(&[cache.blocks, self.page, self.kv_heads * dim], of);
        let (mut bytes, mut executor) = (0, null_mut());
        ok(unsafe {
            aclnnNsaCompressAttentionInferGetWorkspaceSize(
                self.kind.tensor(&self.query_shape(self.dims[0]), &queries),
                paged(&cache.keys, self.dims[0]),
                paged(&cache.values, self.dims[1]),
                null_mut(),
                tensor(INT32, &shape(&[self.lengths.len(), cache.columns]), upload(&cache.table)),
                ints(self.lengths.iter().map(|&(queries, _)| queries)),
                ints(compressed.iter().copied()),
                ints(self.lengths.iter().map(|&(_, tokens)| tokens)),
                null_mut(),
                self.heads() as i64,
                self.kv_heads as i64,
                self.select as i64,
                self.count as i64,
                block as i64,
                stride as i64,
                self.scale(),
                if self.packed { c"TND" } else { c"BSND" }.as_ptr().cast_mut(),
                self.page as i64,
                0,
                tensor(self.kind.dtype(), &shape(&self.query_shape(self.dims[1])), out),
                tensor(INT32, &shape(&self.selected_shape()), selected),
                &mut bytes,
                &mut executor,
            )
        });
        ok(launch(aclnnNsaCompressAttentionInfer, (bytes, executor)));
        // A row sees the compressed tokens whose last token is at its position or before.
        let visible = |row: usize, _: usize| {
            let (sequence, number) = self.numbered()[row];
            let (rows, tokens) = self.lengths[sequence];
            let position = tokens - rows + number;
            (0..compressed[sequence]).filter(|token| token * stride + block <= position + 1).collect::<Vec<_>>()
        };
        let got = self.kind.download(out, self.rows() * self.heads() * self.dims[1]);
        self.compare(&cache, &queries, &got, &visible);
        let got = download::<i32>(selected, self.rows() * self.kv_heads * self.count);
        for (at, got) in got.chunks(self.count).enumerate() {
            let (row, kv_head) = (at / self.kv_heads, at % self.kv_heads);
            let tokens = visible(row, kv_head);
            let mut weights = vec![0.0; tokens.len()];
            for head in kv_head * self.group..(kv_head + 1) * self.group {
                let of_head = self.weights(&cache, &queries, (row, head), &tokens);
                weights.iter_mut().zip(of_head).for_each(|(sum, weight)| *sum += weight);
            }
            self.compare_blocks(got, &weights, compressed[self.numbered()[row].0]);
        }
    }

    /// Compares chosen blocks with the scores of all, which the weights of visible compressed tokens give.
    fn compare_blocks(&self, got: &[i32], weights: &[f64], compressed: usize) {
        let [block, stride] = self.compression;
        let reach = (compressed - 1) * stride + block;
        let blocks = reach.div_ceil(self.select);
        let (outer, inner) = ((self.select / stride) as i64, (block / stride) as i64);
        let score = |of: usize| -> f64 {
            let mut sum = 0.0;
            for m in 0..outer {
                for n in 0..inner {
                    let at = outer * (of as i64 + 1) - m - n;
                    sum += usize::try_from(at).ok().and_then(|at| weights.get(at)).unwrap_or(&0.0);
                }
            }
            sum
        };
        let distinct: BTreeSet<_> = got.iter().copied().collect();
        assert_eq!(distinct.len(), got.len(), "{got:?}");
        let forced: BTreeSet<i32> = [0, blocks - 1, blocks.saturating_sub(2)].map(|block| block as i32).into();
        if got.len() >= forced.len() {
            assert!(forced.is_subset(&distinct), "{got:?} of {blocks}");
        } else {
            assert!(distinct.is_subset(&forced), "{got:?} of {blocks}");
        }
        let others = (0..blocks).filter(|&block| !forced.contains(&(block as i32)));
        let mut all: Vec<f64> = others.map(score).collect();
        all.sort_by(|a, b| b.total_cmp(a));
        let chosen = distinct.difference(&forced).map(|&block| score(usize::try_from(block).unwrap()));
        let mut chosen: Vec<f64> = chosen.collect();
        chosen.sort_by(|a, b| b.total_cmp(a));
        // Near the last chosen score either of two blocks may be there.
        for (chosen, best) in chosen.iter().zip(&all) {
            assert!((chosen - best).abs() <= 1e-5, "{chosen} is not {best}");
        }
    }

    /// Lists of blocks, of which some are filled up.
    fn lists(&self) -> Vec<i32> {
        let mut lists = Vec::new();
        for (row, (sequence, number)) in self.numbered().into_iter().enumerate() {
            let (rows, tokens) = self.lengths[sequence];
            let seen = tokens - (rows - 1 - number);
            let blocks = seen.div_ceil(self.select);
            let valid = 1 + (self.seed as usize + row) % self.count.min(blocks);
            for kv_head in 0..self.kv_heads {
                // All heads have the last block, and as many others.
                let other = |at: usize| ((at * 3 + kv_head) % (blocks - 1).max(1)) as i32;
                let mut list: Vec<i32> = vec![blocks as i32 - 1];
                for at in 0.. {
                    if list.len() == valid || at > 3 * blocks {
                        break;
                    }
                    if !list.contains(&other(at)) && other(at) + 2 != blocks as i32 {
                        list.push(other(at));
                    }
                }
                list.resize(self.count, -1);
                lists.extend(list);
            }
        }
        lists
    }

    /// Attends to selected blocks. `wide` gives the cache an axis of heads.
    fn attend(&self, wide: bool, joined: bool) {
        let most = self.lengths.iter().map(|&(_, tokens)| tokens).max().unwrap();
        let cache = self.cache(most);
        let queries = numbers(self.seed ^ 9, self.rows() * self.heads() * self.dims[0]);
        let lists = self.lists();
        let out = self.kind.upload(&vec![POISON; self.rows() * self.heads() * self.dims[1]]);
        let paged = |of: &[f32], dim: usize| match wide {
            true => self.kind.tensor(&[cache.blocks, self.page, self.kv_heads, dim], of),
            false => self.kind.tensor(&[cache.blocks, self.page, self.kv_heads * dim], of),
        };
        let joined = joined && !self.packed;
        let query_shape = |dim: usize| match joined {
            true => vec![self.lengths.len(), self.lengths[0].0, self.heads() * dim],
            false => self.query_shape(dim),
        };
        let layout = match (self.packed, joined) {
            (true, _) => c"TND",
            (false, true) => c"BSH",
            (false, false) => c"BSND",
        };
        let (mut bytes, mut executor) = (0, null_mut());
        ok(unsafe {
            aclnnNsaSelectedAttentionInferGetWorkspaceSize(
                self.kind.tensor(&query_shape(self.dims[0]), &queries),
                paged(&cache.keys, self.dims[0]),
                paged(&cache.values, self.dims[1]),
                tensor(INT32, &shape(&self.selected_shape()), upload(&lists)),
                null_mut(),
                tensor(INT32, &shape(&[self.lengths.len(), cache.columns]), upload(&cache.table)),
                ints(self.lengths.iter().map(|&(queries, _)| queries)),
                ints(self.lengths.iter().map(|&(_, tokens)| tokens)),
                layout.as_ptr().cast_mut(),
                self.heads() as i64,
                self.kv_heads as i64,
                self.select as i64,
                self.count as i64,
                self.page as i64,
                self.scale(),
                0,
                tensor(self.kind.dtype(), &shape(&query_shape(self.dims[1])), out),
                &mut bytes,
                &mut executor,
            )
        });
        let strict = check_scope(Check::Strict);
        ok(launch(aclnnNsaSelectedAttentionInfer, (bytes, executor)));
        drop(strict);
        let tokens = |row: usize, kv_head: usize| {
            let (sequence, number) = self.numbered()[row];
            let (rows, tokens) = self.lengths[sequence];
            let seen = tokens - (rows - 1 - number);
            let list = &lists[(row * self.kv_heads + kv_head) * self.count..][..self.count];
            let named = list.iter().filter(|&&block| block >= 0);
            let tokens = named.flat_map(|&block| block as usize * self.select..(block as usize + 1) * self.select);
            tokens.filter(|&token| token < seen).collect::<Vec<_>>()
        };
        let got = self.kind.download(out, self.rows() * self.heads() * self.dims[1]);
        self.compare(&cache, &queries, &got, &tokens);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn rows_attend_to_compressed_tokens_and_choose_blocks(draw in draws(), dims in 0usize..3) {
        let _bench = Bench::new();
        Draw { dims: [[192, 128], [64, 64], [128, 96]][dims], ..draw }.choose();
    }

    #[test]
    fn rows_attend_to_selected_blocks(draw in draws(), wide: bool, joined: bool) {
        let _bench = Bench::new();
        draw.attend(wide, joined);
    }
}

const SELECTED: usize = 4;

/// One sequence of 300 tokens in 5 pages of 64, with 2 rows and 2 key heads, whose lists these are.
fn selected(
    lists: [[i32; SELECTED]; 4],
    table: [i32; 5],
    change: &dyn Fn(&mut [*mut aclTensor; 5]),
) -> (i32, (u64, *mut aclOpExecutor)) {
    let kind = Kind { bf16: false };
    let mut tensors = [
        kind.tensor(&[2, 2, 192], &[0.0; 2 * 2 * 192]),
        kind.tensor(&[5, 64, 2 * 192], &[0.0; 5 * 64 * 384]),
        kind.tensor(&[5, 64, 2 * 128], &[1.0; 5 * 64 * 256]),
        tensor(INT32, &[2, 2, SELECTED as i64], upload(lists.as_flattened())),
        kind.tensor(&[2, 2, 128], &[POISON; 2 * 2 * 128]),
    ];
    change(&mut tensors);
    let [query, key, value, lists, out] = tensors;
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        aclnnNsaSelectedAttentionInferGetWorkspaceSize(
            query,
            key,
            value,
            lists,
            null_mut(),
            tensor(INT32, &[1, 5], upload(&table)),
            ints([2].into_iter()),
            ints([300].into_iter()),
            c"TND".as_ptr().cast_mut(),
            2,
            2,
            64,
            SELECTED as i64,
            64,
            0.07,
            0,
            out,
            &mut bytes,
            &mut executor,
        )
    };
    (status, (bytes, executor))
}

#[test]
fn lists_and_blocks_that_say_something_else_are_found() {
    let _bench = Bench::new();
    let list = [0, 4, 3, -1];
    let table = [4, 3, 2, 1, 0];
    let run = |lists, table| {
        let (status, prepared) = selected(lists, table, &|_| {});
        ok(status);
        launch(aclnnNsaSelectedAttentionInfer, prepared)
    };
    let strict = check_scope(Check::Strict);
    ok(run([list; 4], table));
    drop(strict);
    let (skipped, twice) = (FindingKind::SkippedEntry, FindingKind::RepeatedBlock);
    for (lists, table, kind, text) in [
        ([list, list, [0, 5, 4, 3], list], table, skipped, "row 1 of sequence 0, key head 0: block 5 begins past"),
        ([list, [0, 4, 4, -1], list, list], table, twice, "key head 1: block 4 is there twice"),
        ([[0, -1, 4, 3], list, list, list], table, skipped, "block 4 stands after an entry below 0"),
        ([list, [0, 4, -1, -1], list, list], table, skipped, "key head 1: another number of blocks than key head 0"),
        ([list, list, list, [0, 4, 1, -1]], table, skipped, "row 1 of sequence 0, key head 1: another number"),
        ([list; 4], [4, 3, 5, 1, 0], FindingKind::BlockTable, "blockTable: block 5 in column 2 of sequence 0"),
    ] {
        let since = findings().len();
        ok(run(lists, table));
        found(since, kind, text);
        let _strict = check_scope(Check::Strict);
        assert_ne!(run(lists, table), 0, "{text}");
    }
}

#[test]
fn calls_of_attention_without_tensors_are_refused_with_their_status() {
    let _bench = Bench::new();
    let lists = [[0, 4, 3, -1]; 4];
    let refused = |change: &dyn Fn(&mut [*mut aclTensor; 5])| selected(lists, [0; 5], change).0;
    fails(refused(&|tensors| tensors[0] = null_mut()), 561_103, &["query"]);
    fails(refused(&|tensors| tensors[4] = null_mut()), 561_103, &["output"]);
    let wide = |tensors: &mut [*mut aclTensor; 5]| tensors[0] = Kind { bf16: true }.tensor(&[2, 2, 192], &[0.0; 768]);
    fails(refused(&wide), 161_002, &["nsa_selected_attention.dtype"]);
    let empty = |tensors: &mut [*mut aclTensor; 5]| tensors[4] = tensor(HALF, &[0, 2, 128], null_mut());
    let (status, (bytes, _)) = selected(lists, [0; 5], &empty);
    assert_eq!((status, bytes), (0, 0), "an empty output needs nothing");
    let query = Kind { bf16: false }.tensor(&[1, 2, 192], &[0.0; 384]);
    let (mut bytes, mut executor) = (0, null_mut());
    let status = unsafe {
        aclnnNsaCompressAttentionInferGetWorkspaceSize(
            query,
            query,
            query,
            null_mut(),
            null_mut(),
            null_mut(),
            ints([9].into_iter()),
            null_mut(),
            null_mut(),
            2,
            2,
            64,
            3,
            32,
            16,
            0.07,
            c"TND".as_ptr().cast_mut(),
            64,
            0,
            query,
            query,
            &mut bytes,
            &mut executor,
        )
    };
    fails(status, 161_001, &["blockTable"]);
}
