//! Rows of one sequence divided over a ring of ranks.

use ascend_serving::RingAttention;

use super::*;

/// Every row of a rank against attention by its definition, twice, so that the second call meets what the first left.
fn ring<T: Half>(rank: Communicator, tokens: usize, shape: AttentionShape, seed: u64) -> Result<(), String> {
    let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
    let mut ring = RingAttention::new(rank, shape).unwrap();
    for seed in [seed, seed + 7] {
        let all = [shape.heads, shape.kv_heads, shape.kv_heads].map(|heads| [1, heads, tokens, DIM]);
        let [query, key, value] = [0, 1, 2].map(|what| Logical::<T>::random(seed * 10 + what, all[what as usize]));
        let rows = ring.rows(number, tokens);
        let own = |all: &Logical<T>| {
            let data: Vec<T> = rows.iter().flat_map(|rows| all.packed(rows.clone())).collect();
            stream.upload(&data, [data.len() / all.heads / DIM, all.heads, DIM]).unwrap()
        };
        let (own_query, own_key, own_value) = (own(&query), own(&key), own(&value));
        let output = ring.forward(&stream, tokens, (&own_query, &own_key, &own_value)).unwrap();
        drop((own_query, own_key, own_value));
        let output = output.download(&stream).unwrap();
        let exact = [query, key, value].map(|tensor| tensor.exact());
        for (at, position) in rows.into_iter().flatten().enumerate() {
            for head in 0..shape.heads {
                let wanted =
                    row(&exact[0], &exact[1], &exact[2], (0, 0), head, position, shape.scale, |at| at <= position);
                let got = &output[(at * shape.heads + head) * DIM..][..DIM];
                for (got, wanted) in got.iter().zip(&wanted.unwrap().0) {
                    // Each merge rounds.
                    if !abs_diff_eq!(got.to_f64(), wanted, epsilon = 4.0 * T::TOLERANCE) {
                        return Err(format!(
                            "rank {number}, row {position}, head {head}: {}, expected {wanted}",
                            got.to_f64()
                        ));
                    }
                }
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(10) })]

    #[test]
    fn rings_attend_as_one_device_does(
        ranks in 2..=MOST_RANKS,
        tokens in prop_oneof![1 => 1usize..20, 3 => 1usize..400],
        kv_heads in 1usize..3,
        group in 1usize..3,
        seed in any::<u16>(),
    ) {
        if harness::not_on_npu("it needs a device for each rank") {
            return Ok(());
        }
        let shape = AttentionShape::new(kv_heads * group, kv_heads, DIM);
        let run = |rank: Communicator| ring::<f16>(rank, tokens, shape, seed.into());
        let outcome: Result<(), String> = as_ranks(ranks, run).into_iter().collect();
        outcome.map_err(TestCaseError::fail)?;
    }
}

#[test]
fn a_rank_of_a_ring_that_fails_is_named_to_the_others() {
    if harness::not_on_npu("hardware waits for half an hour") {
        return;
    }
    as_ranks(3, |rank| {
        let (stream, number) = (rank.device().stream().unwrap(), rank.rank());
        let mut ring = RingAttention::new(rank, AttentionShape::new(2, 1, DIM)).unwrap();
        let (query, key) = (ones(&stream, 4, 2), ones(&stream, 4, 1));
        let refused = ring.forward(&stream, 11, (&query, &key, &query)).unwrap_err();
        assert!(refused.breaks(&rules::STEP_TOKENS) || refused.breaks(&rules::STEP_HEADS), "{refused}");
        assert!(ring.rows(3, 12).iter().all(|rows| rows.is_empty()));
        if number == 1 {
            return;
        }
        let outcome = ring.forward(&stream, 12, (&query, &key, &key)).and_then(|_| Ok(stream.synchronize()?));
        let text = outcome.unwrap_err().to_string();
        assert!(text.contains("rank 1"), "{text}");
    });
}
