//! Multi-item scoring: each item of a prompt has the attention that it has alone behind the prefix, in one pass or in
//! chunks.

use crate::harness;
use crate::tokens::{DIM, dense, packed};
use approx::abs_diff_eq;

use ascend_attention::bf16;
use ascend_serving::kv::{CacheShape, PadPolicy, PagedKvCache, Sequence};
use ascend_serving::{
    Attention, AttentionMetadata, AttentionShape, Backend, Backends, BatchRequest, BatchSettings, Causality, LayerMask,
    MultiItemPrompt, StatePolicy, rules,
};
use proptest::prelude::*;

/// A prompt: tokens of the prefix and of each item.
type Sizes = (usize, Vec<usize>);

fn sizes() -> impl Strategy<Value = Sizes> {
    (0usize..150, prop::collection::vec(1usize..40, 0..6))
        .prop_filter("a prompt has tokens", |(prefix, items)| prefix + items.len() > 0)
}

fn prompt((prefix, items): &Sizes) -> MultiItemPrompt {
    let starts = items.iter().scan(*prefix, |end, item| {
        let start = *end;
        *end += item;
        Some(start)
    });
    let tokens = prefix + items.iter().sum::<usize>();
    MultiItemPrompt::new(starts.collect::<Vec<_>>(), tokens).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(24) })]

    #[test]
    fn items_are_as_if_they_were_alone(
        sizes in prop::collection::vec(sizes(), 1..4),
        chunk in 1usize..200,
        (kv_heads, group) in (1usize..3, 1usize..3),
    ) {
        let stream = harness::stream();
        let prompts: Vec<MultiItemPrompt> = sizes.iter().map(prompt).collect();
        let shape = AttentionShape::new(kv_heads * group, kv_heads, DIM);
        let of = CacheShape::new(1, kv_heads, DIM);
        let cache = PagedKvCache::<bf16>::new(stream.device(), 24, 128, of, PadPolicy::SkipNegative).unwrap();
        let backends = Backends::none().with(Backend::NamedMask).with(Backend::Fused);
        let mut attention = Attention::new(shape, cache, backends);
        let mut sequences: Vec<Sequence> = prompts.iter().map(|_| Sequence::new(attention.cache().pool())).collect();
        // All requests go on in each step: those that are through take one more token, which is not compared.
        let longest = prompts.iter().map(MultiItemPrompt::tokens).max().unwrap();
        let policy = StatePolicy::new(true, None);
        let settings = BatchSettings::of(attention.cache(), Causality::Causal).policy(policy);
        let mask = LayerMask::from(MultiItemPrompt::mask(prompts.clone()));
        let name = |request: usize, token: usize| (request * 10_000 + token) as u64;
        let mut done = 0;
        while done < longest {
            let new: Vec<usize> = prompts.iter().map(|prompt| prompt.tokens().saturating_sub(done).clamp(1, chunk)).collect();
            let cached: Vec<usize> = sequences.iter().map(Sequence::len).collect();
            for (sequence, new) in sequences.iter_mut().zip(&new) {
                attention.grow(&stream, sequence, *new).unwrap();
            }
            let requests: Vec<_> = sequences.iter().zip(&new).map(|(sequence, new)| BatchRequest::of(sequence, *new)).collect();
            let mut metadata = AttentionMetadata::new(&requests, settings).unwrap();
            metadata.set_mask(mask.clone());
            let rows: Vec<(usize, usize)> = (0..prompts.len()).flat_map(|request| (cached[request]..cached[request] + new[request]).map(move |token| (request, token))).collect();
            let names: Vec<u64> = rows.iter().map(|(request, token)| name(*request, *token)).collect();
            let [query, key, value] = [(0, shape.heads), (1, kv_heads), (2, kv_heads)].map(|(what, heads)| packed::<bf16>(&stream, &names, 0, what, heads));
            let mut step = attention.begin(&stream, &metadata).unwrap();
            let output = step.forward(0, (&query, &key, &value)).unwrap().clone();
            drop(step);
            let output = output.download(&stream).unwrap();
            let width = shape.heads * DIM;
            for (row, (request, token)) in rows.iter().enumerate() {
                let prompt = &prompts[*request];
                if *token >= prompt.tokens() {
                    continue;
                }
                // What a request of the prefix and this item alone would hold.
                let item = prompt.items().find(|item| item.contains(token)).unwrap_or(0..0);
                let prefix = 0..prompt.prefix().min(token + 1);
                let alone: Vec<u64> = prefix.chain(item.start..(token + 1).min(item.end)).map(|token| name(*request, token)).collect();
                let want = dense(&alone, 0, shape, |_| true);
                for (got, want) in output[row * width..][..width].iter().zip(&want) {
                    prop_assert!(abs_diff_eq!(got.to_f64(), want, epsilon = 1e-2), "request {request}, token {token}: {got}, expected {want}");
                }
            }
            done += chunk;
        }
    }

    /// Positions go on behind the prefix in each item, and items hold each token behind it once.
    #[test]
    fn items_and_positions_divide_the_prompt(sizes in sizes()) {
        let of = prompt(&sizes);
        let positions: Vec<usize> = of.positions().collect();
        prop_assert_eq!(positions.len(), of.tokens());
        let mut all: Vec<usize> = (0..of.prefix()).collect();
        for item in of.items() {
            prop_assert_eq!(&positions[item.clone()], (of.prefix()..of.prefix() + item.len()).collect::<Vec<_>>());
            all.extend(item);
        }
        prop_assert_eq!(&positions[..of.prefix()], &all[..of.prefix()]);
        prop_assert_eq!(all, (0..of.tokens()).collect::<Vec<_>>());
    }
}

#[test]
fn items_without_tokens_are_refused() {
    for (starts, tokens) in [(vec![3, 3], 9), (vec![5, 4], 9), (vec![9], 9), (vec![0], 0), (vec![usize::MAX], 1)] {
        let refused = MultiItemPrompt::new(starts, tokens).unwrap_err();
        assert_eq!(refused.rule, &rules::ITEM_STARTS, "{refused}");
    }
    let plain = MultiItemPrompt::by_delimiter(&[1, 2], &9);
    assert_eq!((plain.prefix(), plain.items().count()), (2, 0));
}
