//! Random calls of every path.

use super::calls::{Call, ascend950, dense, paths, quantised, releases};
use super::case::ComputedCall as _;
use super::data::levels;
use ascend_spec::attention_problem::SoftCap;
use ascend_spec::{Cann, DType, Soc, StridedKeys, Target};
use proptest::prelude::*;
use proptest::sample;

/// A third of the cases that `PROPTEST_CASES` sets, because the oracle is slow.
fn config() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: (default.cases / 3).max(1), max_shrink_iters: 0, ..default }
}

fn agree(call: &Call, level: usize, single: bool) -> Result<(), TestCaseError> {
    let levels = levels();
    let level = levels[level % levels.len()];
    let held = single.then_some(DType::Float);
    match call.check(held, level) {
        Ok(()) => Ok(()),
        Err(difference) => Err(TestCaseError::fail(format!("{difference}\n{call:?}"))),
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn dense_calls_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&dense::dense(seed), level, single)?;
    }

    #[test]
    fn calls_of_every_release_agree_with_the_oracle(seed: u64, release in 0..4usize, level: usize, single: bool) {
        let target = Target::new(Soc::AtlasA2, Cann::ALL[release]);
        agree(&releases::accepted(seed, target), level, single)?;
    }

    #[test]
    fn blocks_that_lie_apart_agree_with_the_oracle(seed: u64, which in 0..3usize, level: usize, single: bool) {
        let target = [
            Target::new(Soc::AtlasA2, Cann::V9_2),
            Target::new(Soc::AtlasA2, Cann::V9_1).strided_keys(StridedKeys::Copied),
            Target::new(Soc::Ascend950, Cann::V9_2),
        ][which];
        agree(&releases::blocks_apart(seed, target), level, single)?;
    }

    #[test]
    fn packed_sequences_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&paths::packed(seed), level, single)?;
    }

    #[test]
    fn paged_caches_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&paths::paged(seed), level, single)?;
    }

    #[test]
    fn latent_attention_agrees_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&paths::latent(seed), level, single)?;
    }

    #[test]
    fn capped_scores_agree_with_the_oracle(
        seed: u64, path in 0..6usize, level: usize, single: bool, cap in sample::select(vec![0.5, 3.0, 50.0, 1e6]),
    ) {
        let paths =
            [dense::dense, paths::packed, paths::paged, paths::latent, paths::biased, quantised::quantised];
        let single = (single && path < 5).then_some(DType::Float);
        let levels = levels();
        let level = levels[level % levels.len()];
        let call = paths[path](seed);
        let checked = call.with(single, |problem, data| {
            let mut problem = problem.clone();
            problem.soft_cap = SoftCap::new(cap);
            data.check(&problem, level)
        });
        prop_assert!(checked.is_ok(), "{checked:?}\n{call:?}");
    }

    #[test]
    fn biases_prefixes_and_padding_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&paths::biased(seed), level, single)?;
    }

    #[test]
    fn halves_of_ascend_950_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&ascend950::accepted(ascend950::half, seed), level, single)?;
    }

    #[test]
    fn quantised_outputs_of_ascend_950_agree_with_the_oracle(seed: u64, level: usize) {
        agree(&ascend950::accepted(ascend950::post_quantised, seed), level, false)?;
    }

    #[test]
    fn quantised_keys_of_ascend_950_agree_with_the_oracle(seed: u64, level: usize) {
        agree(&ascend950::accepted(ascend950::antiquant, seed), level, false)?;
    }

    #[test]
    fn latent_attention_of_ascend_950_agrees_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&ascend950::accepted(ascend950::latent, seed), level, single)?;
    }

    #[test]
    fn mxfp8_agrees_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&ascend950::accepted(ascend950::mxfp8, seed), level, single)?;
    }

    #[test]
    fn fp8_agrees_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&ascend950::accepted(ascend950::fp8, seed), level, single)?;
    }

    #[test]
    fn slopes_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&paths::sloped(seed), level, single)?;
    }

    #[test]
    fn quantised_keys_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&quantised::antiquant(seed), level, single)?;
    }

    #[test]
    fn quantised_nz_caches_agree_with_the_oracle(seed: u64, level: usize, single: bool) {
        agree(&quantised::nz(seed), level, single)?;
        agree(&quantised::packed_nz(seed), level, single)?;
    }

    #[test]
    fn quantised_queries_and_outputs_agree_with_the_oracle(seed: u64, level: usize) {
        agree(&quantised::quantised(seed), level, false)?;
    }
}
