//! The masks of the parts of the triangle.

use std::num::NonZeroU64;

use ascend_attention::SparseMode;
use ascend_attention::blockwise::BlockCover;
use ascend_attention::mask::{HostMask, MaskForm};
use ascend_attention::spec::geometry::{BlockMap, TriangleMix, TrianglePart, TriangleRows};
use ascend_serving::NamedMask;
use ascend_testing::harness::{attends, stream};
use ascend_trianglemix::{TriangleLayers, TriangleMasks};

#[test]
fn attention_to_the_parts_of_a_triangle_follows_the_paper() {
    let stream = stream();
    let masks = stream.device().masks();
    let sizes = TriangleMix::new(3, 9, 7);
    let n = 60;
    // The whole prompt, and a chunk that has the first of the last rows.
    for (first_row, rows) in [(0, n), (30, 25)] {
        let keys = first_row + rows;
        for part in TrianglePart::ALL {
            let of = TriangleRows { first_row: first_row as u64, rows: rows as u64, prompt_len: n as u64 };
            let mask = masks.triangle_mix(sizes, part, of).unwrap();
            attends(&stream, (rows, keys), mask, |i, j| {
                let q = i + first_row;
                let streaming = j < 3 || q.wrapping_sub(j) <= 9;
                let last = q >= n - 7;
                j <= q
                    && match part {
                        TrianglePart::Streaming => streaming,
                        TrianglePart::Last => !streaming && last,
                        TrianglePart::Middle => !streaming && !last,
                        TrianglePart::Triangle => streaming || last,
                        TrianglePart::Dense => true,
                    }
            });
        }
    }
    // A prompt too short to leave anything out takes no tensor of its size.
    let short = masks.triangle_mix(sizes, TrianglePart::Triangle, TriangleRows::whole(20)).unwrap();
    assert_eq!(short.sparse_mode(), SparseMode::RightDownCausal);
    let layers = TriangleLayers::first(2).unwrap();
    let layer = |layer, rows, prompt_len| {
        let mask = masks.triangle_layer(sizes, &layers, layer, (0, rows), prompt_len);
        mask.unwrap().sparse_mode()
    };
    assert_eq!(layer(1, 60, Some(60)), SparseMode::AllMask);
    assert_eq!(layer(2, 60, Some(60)), SparseMode::RightDownCausal);
    assert_eq!(layer(1, 60, None), SparseMode::RightDownCausal);
    assert_eq!(layer(1, 1, Some(60)), SparseMode::RightDownCausal);
}

/// A rule of the caller has full and partial blocks by its mask on the host.
#[test]
fn named_masks_are_covered_by_their_host_masks() {
    let named = NamedMask::new("chunks of 128 and a shared one", |_, token, key| {
        key < 128 || key <= token && key / 128 == token / 128
    });
    let sees = |token, key| named.sees(0, token, key);
    let host = HostMask::from_fn(300, 300, MaskForm::INT8, sees).unwrap();
    let entry = host.entry(0);
    let map = BlockMap::new(&entry, NonZeroU64::new(128).unwrap());
    assert_eq!(map.to_string(), "#..\n#+.\n#.+\n");
    let cover = BlockCover::new(&[entry]).unwrap();
    assert_eq!((cover.full_blocks(), cover.row_pairs()), (3, 172 * 128));
}
