//! Calls that follow the book's recipe are taken by every release from 8.5 on, and mean the same on each.

use crate::corners::{half, of};
use ascend_spec::ops::fused_infer_attention_score::{FiaCall, Version};
use ascend_spec::{Cann, DType, Dims, Extents, Layout, Soc, Target, TensorDesc};
use proptest::prelude::*;

const LAYOUTS: [&str; 9] = ["BSH", "BSND", "BNSD", "BNSD_BSND", "TND", "NTD", "NTD_TND", "BSH_BNSD", "BSND_BNSD"];

/// Where keys and values lie.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Store {
    Dense,
    /// Blocks of 128 tokens in a cache of this many axes, the table some blocks wider than it has to be.
    Paged(usize, i64),
    List,
}

/// A call of the recipe.
#[derive(Clone, Debug)]
struct Recipe {
    layout: Layout,
    dtype: DType,
    batch: i64,
    kv_heads: i64,
    group: i64,
    rows: i64,
    dim: i64,
    /// Key lengths of the sequences.
    keys: Vec<i64>,
    store: Store,
    mode: i64,
    /// Axes and batch of a full mask; mode 0 has one where this is given.
    full: Option<(bool, bool)>,
    band: (i64, i64),
    inner_precise: i64,
    lse: bool,
    sink: bool,
}

fn recipe() -> impl Strategy<Value = Recipe> {
    let store = prop_oneof![
        Just(Store::Dense),
        (3..=4usize, 0..3i64).prop_map(|(axes, more)| Store::Paged(axes, more)),
        Just(Store::List),
    ];
    let sizes = (1..5i64, 1..5i64, 1..140i64, prop_oneof![Just(1), 2..40i64]);
    let what = (0..LAYOUTS.len(), any::<bool>(), any::<bool>(), 0..5i64, 0..4i64);
    let rest = (any::<Option<(bool, bool)>>(), -20..40i64, 0..60i64, any::<bool>(), any::<bool>());
    (sizes, what, store, rest, any::<[u8; 4]>()).prop_map(|(sizes, what, store, rest, lengths)| {
        let (batch, kv_heads, group, rows) = sizes;
        let (layout, bf16, wide, mode, inner_precise) = what;
        let (full, pre, width, lse, sink) = rest;
        let layout = Layout::parse(LAYOUTS[layout]).unwrap();
        let classic = !matches!(layout, Layout::BshBnsd | Layout::BsndBnsd);
        let single = rows == 1 && matches!(layout, Layout::Bsh | Layout::Bsnd | Layout::Bnsd);
        let least = rows;
        let keys = lengths.iter().take(batch as usize);
        let list = store == Store::List && (layout.is_packed() || !classic);
        let full = full.filter(|_| mode == 1 || layout != Layout::Tnd);
        Recipe {
            layout,
            dtype: if bf16 { DType::Bf16 } else { DType::Float16 },
            batch,
            kv_heads,
            group,
            rows,
            dim: if wide { 128 } else { 64 },
            keys: keys.map(|&len| least + i64::from(len)).collect(),
            store: if list { Store::Dense } else { store },
            mode: if single { 0 } else { mode },
            full: match (single, mode) {
                (true, _) => None,
                (false, 1) => Some(full.unwrap_or((true, false))),
                (false, _) => full,
            },
            band: (pre, width - pre),
            inner_precise: if sink && bf16 { 0 } else { inner_precise },
            lse,
            sink: sink && bf16,
        }
    })
}

impl Recipe {
    fn longest(&self) -> i64 {
        self.keys.iter().copied().max().unwrap()
    }

    fn tensor(&self, heads: i64, batch: i64, rows: i64) -> TensorDesc {
        let of = Extents { batch, heads, rows, dim: self.dim };
        TensorDesc::packed(self.dtype, self.layout.input().shape(of))
    }

    /// Builds the call, and hands it on.
    fn with(&self, take: &mut dyn FnMut(&FiaCall<'_>)) {
        let packed = self.layout.is_packed();
        let heads = self.kv_heads * self.group;
        let (batch, rows) = match packed {
            true => (1, self.batch * self.rows),
            false => (self.batch, self.rows),
        };
        let extents = Extents { batch, heads, rows, dim: self.dim };
        let columns = |more: i64| (self.longest() + 127) / 128 + more;
        let mut table = None;
        let key: Vec<TensorDesc> = match self.store {
            Store::Paged(axes, more) => {
                let blocks = self.batch * columns(more);
                table = TensorDesc::contiguous(DType::Int32, &[self.batch, columns(more)]);
                vec![match axes {
                    3 => of(self.dtype, &[blocks, 128, self.kv_heads * self.dim]),
                    _ => of(self.dtype, &[blocks, self.kv_heads, 128, self.dim]),
                }]
            }
            Store::List if self.batch > 1 => {
                let one = |&len: &i64| self.tensor(self.kv_heads, 1, len);
                self.keys.iter().map(one).collect()
            }
            _ if packed => vec![self.tensor(self.kv_heads, 1, self.keys.iter().sum())],
            _ => vec![self.tensor(self.kv_heads, self.batch, self.longest())],
        };
        let ends = |lengths: &mut dyn Iterator<Item = i64>| -> Vec<i64> {
            lengths
                .scan(0, |end, len| {
                    *end += len;
                    Some(*end)
                })
                .collect()
        };
        let q_ends = ends(&mut (0..self.batch).map(|_| self.rows));
        let kv_ends = ends(&mut self.keys.iter().copied());
        let paged = table.is_some();
        let width = match self.store {
            Store::Paged(_, more) => columns(more) * 128,
            _ => self.longest(),
        };
        let full = self.full.map(|(four, each)| {
            let b = if each { self.batch } else { 1 };
            match four {
                true => of(DType::Bool, &[b, 1, self.rows, width]),
                false => of(DType::UInt8, &[b, self.rows, width]),
            }
        });
        let atten_mask = match self.mode {
            0 | 1 => full,
            _ => TensorDesc::contiguous(DType::Int8, &[2048, 2048]),
        };
        let (pre_tokens, next_tokens) = match self.mode {
            4 => self.band,
            _ => (FiaCall::ALL_TOKENS, FiaCall::ALL_TOKENS),
        };
        take(&FiaCall {
            query: Some(self.tensor(heads, batch, rows)),
            key: &key,
            value: &key,
            atten_mask,
            actual_seq_lengths: packed.then_some(&q_ends[..]),
            actual_seq_lengths_kv: match packed && !paged {
                true => Some(&kv_ends),
                false => Some(&self.keys),
            },
            block_table: table,
            block_size: if paged { 128 } else { 0 },
            learnable_sink: TensorDesc::contiguous(DType::Bf16, &[heads]).filter(|_| self.sink),
            num_heads: heads,
            num_key_value_heads: self.kv_heads,
            pre_tokens,
            next_tokens,
            sparse_mode: self.mode,
            inner_precise: self.inner_precise,
            softmax_lse_flag: self.lse,
            softmax_lse: self.lse.then(|| TensorDesc::packed(DType::Float, self.layout.lse_shape(extents))),
            attention_out: Some(TensorDesc::packed(self.dtype, self.layout.out_shape(extents))),
            ..FiaCall::new(self.layout.as_str())
        });
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn a_call_of_the_recipe_means_the_same_from_8_5_on(recipe in recipe()) {
        recipe.with(&mut |call| {
            for soc in [Soc::AtlasA2, Soc::AtlasA3] {
                for cann in [Cann::V8_5, Cann::V9_0, Cann::V9_1] {
                    let target = Target::new(soc, cann);
                    if let Err(refusal) = call.check(Version::V4, target) {
                        panic!("{target}: {refusal}\n{recipe:?}");
                    }
                }
                let mut differences = Vec::new();
                let target = Target::new(soc, Cann::V8_5);
                call.each_difference(Version::V4, target, Cann::V8_5, &mut |lint| {
                    differences.push(lint.to_string());
                });
                assert!(differences.is_empty(), "{differences:#?}\n{recipe:?}");
            }
        });
    }
}

#[test]
fn a_shape_of_the_recipe_is_what_it_says() {
    let recipe = Recipe {
        layout: Layout::Tnd,
        dtype: DType::Bf16,
        batch: 2,
        kv_heads: 2,
        group: 4,
        rows: 3,
        dim: 64,
        keys: vec![130, 5],
        store: Store::Paged(3, 1),
        mode: 3,
        full: None,
        band: (0, 0),
        inner_precise: 1,
        lse: true,
        sink: false,
    };
    recipe.with(&mut |call| {
        assert_eq!(call.query.unwrap().shape, Dims::of([6, 8, 64]));
        assert_eq!(call.key[0].shape, Dims::of([6, 128, 128]));
        assert_eq!(call.block_table.unwrap().shape, Dims::of([2, 3]));
        assert_eq!(call.actual_seq_lengths, Some(&[3, 6][..]));
        assert_eq!(call.actual_seq_lengths_kv, Some(&[130, 5][..]));
        assert_eq!(call.softmax_lse.unwrap().shape, Dims::of([6, 8, 1]));
    });
}

#[test]
fn who_takes_a_refused_call_is_the_next_release_or_another_product() {
    let taken_by = |dim: i64, soc: Soc, cann: Cann, lse: bool| {
        let (query, key) = (half(&[5, 8, dim]), [half(&[5, 2, dim])]);
        let call = FiaCall {
            query: Some(query),
            key: &key,
            value: &key,
            actual_seq_lengths: Some(&[5]),
            actual_seq_lengths_kv: Some(&[5]),
            num_heads: 8,
            num_key_value_heads: 2,
            softmax_lse_flag: lse,
            attention_out: Some(query),
            ..FiaCall::new("TND")
        };
        let target = Target::new(soc, cann);
        call.taken_by(Version::V1, target, &[])
    };
    let target = |soc, cann| Some(Target::new(soc, cann));
    for soc in [Soc::AtlasA2, Soc::AtlasA3] {
        assert_eq!(taken_by(128, soc, Cann::V8_1, false), target(soc, Cann::V8_5));
    }
    // The newest release of the product refuses it too; Ascend 950 does not, where it is known.
    let other = target(Soc::Ascend950, Cann::V9_0);
    assert_eq!(taken_by(512, Soc::AtlasA2, Cann::V8_1, false), other);
    // A product without the operator is named the others, first that which shares its release.
    let a2 = target(Soc::AtlasA2, Cann::V8_5);
    assert_eq!(taken_by(128, Soc::AtlasInference, Cann::V8_5, false), a2);
    // Log-sum-exps without a place for them are refused everywhere.
    assert_eq!(taken_by(128, Soc::AtlasA2, Cann::V8_1, true), None);
}
