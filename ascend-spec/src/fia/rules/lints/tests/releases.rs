//! Lints of releases from 8.5 on, and of Ascend 950.

use super::{Found, bf16, half, int8, lints_on, mask, of, with};
use crate::fia::{FiaCall, Version};
use crate::{Cann, DType, Soc, Target};

const A2: Target = Target::new(Soc::AtlasA2, Cann::V9_1);
const A2_9_0: Target = Target::new(Soc::AtlasA2, Cann::V9_0);
const ASCEND_950: Target = Target::new(Soc::Ascend950, Cann::V9_1);

pub(super) fn split_fused(found: &mut Found) {
    let key = [bf16(&[20, 2, 80])];
    let four = [bf16(&[20, 4, 80])];
    let packed = FiaCall {
        query: Some(bf16(&[9, 4, 80])),
        key: &key,
        value: &key,
        num_heads: 4,
        num_key_value_heads: 2,
        actual_seq_lengths: Some(&[4, 9]),
        actual_seq_lengths_kv: Some(&[8, 20]),
        attention_out: Some(bf16(&[9, 4, 80])),
        ..FiaCall::new("TND")
    };
    assert_eq!(lints_on(&packed, Version::V5, A2), [""; 0]);
    found.breaks_on(
        "split_fuse.ends",
        &with(&packed, |c| c.actual_seq_lengths = Some(&[11, 9])),
        A2,
    );
    found.breaks_on(
        "split_fuse.causal_rows",
        &with(&packed, |c| {
            (c.sparse_mode, c.atten_mask) = (3, mask(&[2048, 2048]));
            c.actual_seq_lengths_kv = Some(&[3, 20]);
        }),
        A2,
    );
    found.breaks_on(
        "split_fuse.kv_heads",
        &with(&packed, |c| c.num_key_value_heads = 1),
        A2,
    );
    found.breaks_on(
        "split_fuse.output_dtype",
        &with(&packed, |c| c.attention_out = Some(half(&[9, 4, 80]))),
        A2,
    );
    found.breaks_on(
        "split_fuse.ignored",
        &with(&packed, |c| c.value_shared_prefix = Some(bf16(&[1]))),
        A2,
    );
    let own = with(&packed, |c| {
        (c.key, c.value, c.num_key_value_heads) = (&four, &four, 0);
    });
    found.breaks_on("split_fuse.kv_heads_zero", &own, A2);
    found.breaks_on("split_fuse.kv_heads_zero", &own, A2_9_0);
}

pub(super) fn unified(found: &mut Found) {
    let key = [bf16(&[2, 64, 4, 64])];
    let two = [key[0], key[0]];
    let single = FiaCall {
        query: Some(bf16(&[2, 1, 4, 64])),
        key: &key,
        value: &key,
        num_heads: 4,
        attention_out: Some(bf16(&[2, 1, 4, 64])),
        ..FiaCall::new("BSND")
    };
    assert_eq!(lints_on(&single, Version::V5, A2), [""; 0]);
    found.breaks_on(
        "sparse_mode.single_row",
        &with(&single, |c| {
            (c.sparse_mode, c.atten_mask) = (3, mask(&[2048, 2048]));
        }),
        A2,
    );
    found.breaks_on(
        "learnable_sink.combined",
        &with(&single, |c| {
            c.learnable_sink = Some(bf16(&[4]));
            c.pse_shift = Some(bf16(&[1, 4, 1, 64]));
        }),
        A2,
    );
    found.breaks_on(
        "pse_type.ignored",
        &with(&single, |c| c.pse_type = 2),
        A2_9_0,
    );
    found.breaks_on(
        "key.list_batch_unchecked",
        &with(&single, |c| (c.key, c.value) = (&two, &two)),
        A2,
    );
    let out = with(&single, |c| c.attention_out = Some(int8(&[2, 1, 4, 64])));
    let problem = out.check(Version::V5, A2_9_0);
    assert!(problem.is_err(), "what has no scale is not computed");
    let several = with(&single, |c| {
        c.query = Some(bf16(&[2, 3, 4, 64]));
        c.attention_out = Some(bf16(&[2, 3, 4, 64]));
    });
    found.breaks_on(
        "pse_shift.one_row",
        &with(&several, |c| c.pse_shift = Some(bf16(&[1, 4, 1, 64]))),
        ASCEND_950,
    );
    let odd = [of(DType::Bf16, &[2, 64, 4, 7])];
    found.breaks_on(
        "head_dim.unaligned",
        &with(&single, |c| {
            c.query = Some(bf16(&[2, 1, 4, 7]));
            (c.key, c.value) = (&odd, &odd);
            c.attention_out = Some(bf16(&[2, 1, 4, 7]));
        }),
        ASCEND_950,
    );
}
