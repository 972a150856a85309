//! The masks of the parts of the triangle.

use ascend_attention::SparseMode;
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
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
            let of = TriangleRows {
                first_row: first_row as u64,
                rows: rows as u64,
                prompt_len: n as u64,
            };
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
    let short = masks
        .triangle_mix(sizes, TrianglePart::Triangle, TriangleRows::whole(20))
        .unwrap();
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
