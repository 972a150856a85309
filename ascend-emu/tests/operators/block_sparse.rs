//! BlockSparseAttention through its C functions: the blocks that rows see, and masks that say other than they do.

use crate::bench::*;
use crate::found::has_found;
use ascend_emu::abi::*;
use ascend_emu::{Check, FindingKind, check_scope, findings};
use ascend_sys::bindings::{aclDataType, aclOpExecutor, aclTensor, aclrtStream};
use half::f16;
use std::ffi::c_void;
use std::ptr::{null, null_mut};

const HALF: aclDataType = aclDataType::ACL_FLOAT16;
const WORKSPACE: u64 = 16 << 20;
const ROWS: usize = 4;
const KEYS: usize = 300;
const DIM: usize = 64;
/// What the outputs hold before.
const OLD: f32 = 77.0;

const QUERY: usize = 0;
const KEY: usize = 1;
const VALUE: usize = 2;
const MASK: usize = 3;
const OUT: usize = 4;
const LSE: usize = 5;

/// Two sequences of 3 rows and 1, and of 200 keys and 100, in blocks of 2 rows and 128 keys. All scores are 0 and each
/// value is its row, so that a row is the mean of the rows that it sees, and its log-sum-exp that of their number.
struct BlockSparse {
    tensors: [*mut aclTensor; 6],
    out: *mut c_void,
    lse: *mut c_void,
    layout: &'static std::ffi::CStr,
    workspace: Memory,
}

impl BlockSparse {
    /// The mask names for each block of rows whether it sees each block of keys.
    fn new(mask: [[u8; 2]; 4]) -> Self {
        let shape = |shape: &[usize]| shape.iter().map(|&size| size as i64).collect::<Vec<_>>();
        let half = |sizes: &[usize], data| tensor(HALF, &shape(sizes), data);
        let values = (0..KEYS).flat_map(|row| [f16::from_f32(row as f32); DIM]);
        let values: Vec<f16> = values.collect();
        let zeros = |count: usize| upload(&vec![f16::ZERO; count]);
        let out = upload(&[f16::from_f32(OLD); ROWS * DIM]);
        let lse = upload(&[OLD; ROWS]);
        BlockSparse {
            tensors: [
                half(&[ROWS, 1, DIM], zeros(ROWS * DIM)),
                half(&[KEYS, 1, DIM], zeros(KEYS * DIM)),
                half(&[KEYS, 1, DIM], upload(&values)),
                tensor(aclDataType::ACL_INT8, &[2, 1, 2, 2], upload(&mask.concat())),
                half(&[ROWS, 1, DIM], out),
                tensor(aclDataType::ACL_FLOAT, &[ROWS as i64, 1, 1], lse),
            ],
            out,
            lse,
            layout: c"TND",
            workspace: Memory::new(WORKSPACE as usize),
        }
    }

    /// The call without a tensor.
    fn without(mut self, tensor: usize) -> Self {
        self.tensors[tensor] = null_mut();
        self
    }

    fn try_prepare(&self) -> (i32, *mut aclOpExecutor) {
        let [query, key, value, mask, out, lse] = self.tensors;
        let ints = |values: &[i64]| unsafe { aclCreateIntArray(values.as_ptr(), values.len() as u64) };
        let (mut bytes, mut executor) = (0, null_mut());
        let layout = self.layout.as_ptr().cast_mut();
        let status = unsafe {
            aclnnBlockSparseAttentionGetWorkspaceSize(
                query,
                key,
                value,
                mask,
                null(),
                ints(&[2, 128]),
                ints(&[3, 1]),
                ints(&[200, 100]),
                null(),
                layout,
                layout,
                1,
                0,
                1.0,
                0,
                0,
                i64::from(i32::MAX),
                i64::from(i32::MAX),
                1,
                out,
                lse,
                &mut bytes,
                &mut executor,
            )
        };
        (status, executor)
    }

    fn run(&self, stream: aclrtStream) -> i32 {
        let (status, executor) = self.try_prepare();
        ok(status);
        ok(unsafe { aclnnBlockSparseAttention(self.workspace.at, WORKSPACE, executor, stream) });
        unsafe { aclrtSynchronizeStream(stream) }
    }

    /// The elements of each row, which are all the same, and the log-sum-exps.
    fn rows(&self) -> ([f32; ROWS], Vec<f32>) {
        let all = download::<f16>(self.out, ROWS * DIM);
        let rows = all.as_chunks::<DIM>().0;
        assert!(rows.iter().all(|row| row.iter().all(|&element| element == row[0])));
        let rows = std::array::from_fn(|row| rows[row][0].to_f32());
        (rows, download::<f32>(self.lse, ROWS))
    }
}

const PLAIN: [[u8; 2]; 4] = [[1, 0], [0, 1], [1, 0], [0, 0]];

#[test]
fn rows_attend_to_the_blocks_of_their_mask() {
    let _bench = Bench::new();
    let stream = stream();
    let call = BlockSparse::new(PLAIN);
    ok(call.run(stream));
    let (rows, lse) = call.rows();
    // The last row has the keys from row 200 on, all of them.
    assert_eq!(rows, [63.5, 63.5, 163.5, 249.5]);
    let want = [128.0f32, 128.0, 72.0, 100.0].map(f32::ln);
    let near = lse.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-5);
    assert!(near, "{lse:?}");
}

#[test]
fn masks_that_say_other_than_they_do_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    let [first, second, third, fourth] = PLAIN;
    for (kind, text, mask, last) in [
        (
            FindingKind::SkippedEntry,
            "[1, 0, 0, 1] names a block behind the 100 keys",
            [first, second, [1, 1], fourth],
            249.5,
        ),
        (FindingKind::MaskByte, "[1, 0, 0, 0] is -2, which counts as 1", [first, second, [254, 0], fourth], 249.5),
        (FindingKind::HiddenRow, "[1, 0, 0] names no block", [first, second, [0, 0], fourth], OLD),
    ] {
        let seen = findings().len();
        let call = BlockSparse::new(mask);
        ok(call.run(stream));
        assert_eq!(call.rows().0[3], last, "{text}");
        let text = format!("blockSparseMask{text}");
        assert!(has_found(seen, kind, &text), "{text}: {:?}", &findings()[seen..]);
        let _strict = check_scope(Check::Strict);
        assert_ne!(BlockSparse::new(mask).run(stream), 0, "{text}");
    }
    // Blocks of rows that a sequence does not have are not looked at.
    let _strict = check_scope(Check::Strict);
    ok(BlockSparse::new([first, second, third, [7, 1]]).run(stream));
}

#[test]
fn keys_that_nothing_has_written_and_rows_that_are_not_written_are_found() {
    let _bench = Bench::new();
    let stream = stream();
    // Of the keys those of the first block alone are written.
    let bytes = KEYS * DIM * 2;
    let keys = || {
        let keys = malloc(bytes);
        let written = vec![f16::ZERO; 128 * DIM];
        ok(unsafe { aclrtMemcpy(keys, bytes, written.as_ptr().cast(), 128 * DIM * 2, H2D) });
        tensor(HALF, &[KEYS as i64, 1, DIM as i64], keys)
    };
    let unwritten = |mask: [[u8; 2]; 4]| {
        let mut call = BlockSparse::new(mask);
        call.tensors[KEY] = keys();
        let seen = findings().len();
        ok(call.run(stream));
        has_found(seen, FindingKind::UnwrittenRead, "key")
    };
    assert!(unwritten(PLAIN));
    assert!(!unwritten([[1, 0], [1, 0], [0, 0], [0, 0]]));

    let mut none = BlockSparse::new([[0; 2]; 4]);
    none.out = malloc(ROWS * DIM * 2);
    none.tensors[OUT] = tensor(HALF, &[ROWS as i64, 1, DIM as i64], none.out);
    ok(none.run(stream));
    let seen = findings().len();
    let _ = download::<f16>(none.out, ROWS * DIM);
    assert!(has_found(seen, FindingKind::UnwrittenCopy, ""), "{:?}", &findings()[seen..]);
}

#[test]
fn missing_tensors_are_refused_by_name_with_their_status() {
    let _bench = Bench::new();
    for (tensor, status) in
        [(QUERY, 161_001), (KEY, 161_001), (VALUE, 161_001), (OUT, 161_001), (LSE, 561_103), (MASK, 561_002)]
    {
        let call = BlockSparse::new(PLAIN).without(tensor);
        assert_eq!(call.try_prepare().0, status, "{tensor}");
    }
    let mut unknown = BlockSparse::new(PLAIN);
    unknown.layout = c"BSH";
    assert_eq!(unknown.try_prepare().0, 161_002);
}
