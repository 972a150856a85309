//! Results do not depend on the placement of rows: the same keys in one tensor, or scattered over blocks of any size,
//! produce the same bits.

use super::calls::contents::fill;
use super::calls::{Call, Random, desc};
use super::case::ComputedCall as _;
use super::data::levels;
use crate::kernel::simd::Level;
use ascend_spec::ops::fused_infer_attention_score::Parameter;
use ascend_spec::{DType, Extents, Layout};

const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Query, keys and values of a call with one row, dense.
struct Numbers {
    group: usize,
    keys: usize,
    stored: DType,
    query: Vec<u8>,
    key: Vec<u8>,
    value: Vec<u8>,
    /// Scales of stored numbers, a channel each.
    scales: Vec<u8>,
}

impl Numbers {
    fn new(group: usize, keys: usize, stored: DType) -> Self {
        let mut random = Random((group * 1000 + keys) as u64);
        let mut bytes = |parameter, heads: usize, rows: usize, dtype| {
            let desc = desc(dtype, &[1, heads as i64, rows as i64, DIM as i64]);
            fill(parameter, &desc, dtype, &mut random)
        };
        Numbers {
            group,
            keys,
            stored,
            query: bytes(Parameter::Query, KV_HEADS * group, 1, DType::Float16),
            key: bytes(Parameter::Key, KV_HEADS, keys, stored),
            value: bytes(Parameter::Value, KV_HEADS, keys, stored),
            scales: bytes(Parameter::KeyAntiquantScale, KV_HEADS, 1, DType::Float16),
        }
    }

    /// The output if keys and values are in a tensor of this shape.
    fn output(&self, shape: &[usize], table: Option<&[i32]>, level: Level) -> Vec<u8> {
        let query = Extents { batch: 1, heads: (KV_HEADS * self.group) as i64, rows: 1, dim: DIM as i64 };
        let mut call = Call::new(Layout::Bnsd, DType::Float16, query, 1);
        let shape: Vec<i64> = shape.iter().map(|&n| n as i64).collect();
        call.key = vec![desc(self.stored, &shape)];
        call.value = call.key.clone();
        call.plain.num_key_value_heads = KV_HEADS as i64;
        call.kv_lens = Some(vec![self.keys as i64]);
        if self.stored == DType::Int8 {
            let scale = desc(DType::Float16, &[1, (KV_HEADS * DIM) as i64]);
            call.plain.key_antiquant_scale = Some(scale);
            call.plain.value_antiquant_scale = Some(scale);
        }
        call.contents = vec![
            (Parameter::Query.into(), self.query.clone()),
            (Parameter::KeyAntiquantScale.into(), self.scales.clone()),
            (Parameter::ValueAntiquantScale.into(), self.scales.clone()),
        ];
        let place = |dense: &[u8]| match table {
            None => dense.to_vec(),
            Some(table) => self.scattered(dense, shape[2] as usize, table),
        };
        call.contents.push((Parameter::Key.into(), place(&self.key)));
        call.contents.push((Parameter::Value.into(), place(&self.value)));
        if let Some(table) = table {
            call.plain.block_size = shape[2];
            call.plain.block_table = Some(desc(DType::Int32, &[1, table.len() as i64]));
            let ids = table.iter().flat_map(|id| id.to_le_bytes()).collect();
            call.contents.push((Parameter::BlockTable.into(), ids));
        }
        call.with(None, |problem, data| {
            data.run(problem, level);
            data.bytes(Parameter::AttentionOut).to_vec()
        })
    }

    /// Rows of a dense tensor in the blocks that the table names.
    fn scattered(&self, dense: &[u8], block: usize, table: &[i32]) -> Vec<u8> {
        let row = dense.len() / (KV_HEADS * self.keys);
        let mut blocks = vec![0; table.len() * KV_HEADS * block * row];
        for head in 0..KV_HEADS {
            for key in 0..self.keys {
                let id = table[key / block] as usize;
                let to = ((id * KV_HEADS + head) * block + key % block) * row;
                let from = (head * self.keys + key) * row;
                blocks[to..to + row].copy_from_slice(&dense[from..from + row]);
            }
        }
        blocks
    }
}

#[test]
fn blocks_of_any_size_give_the_bits_of_one_tensor() {
    for level in levels() {
        for (group, stored) in
            [1, 2, 3, 4, 7].map(|group| (group, DType::Float16)).into_iter().chain([(4, DType::Int8)])
        {
            for keys in [1, 47, 48, 49, 131, 300] {
                let numbers = Numbers::new(group, keys, stored);
                let dense = numbers.output(&[1, KV_HEADS, keys, DIM], None, level);
                assert!(dense.iter().any(|byte| *byte != 0));
                for block in [16, 32, 48, 128] {
                    if stored == DType::Int8 && block % 32 != 0 {
                        continue;
                    }
                    let count = keys.div_ceil(block);
                    // From the last to the first: no two blocks follow each other.
                    let table: Vec<i32> = (0..count as i32).rev().collect();
                    let shape = [count, KV_HEADS, block, DIM];
                    let paged = numbers.output(&shape, Some(&table), level);
                    let call = format!("{group} {stored:?} {keys} {block} {level:?}");
                    assert_eq!(paged, dense, "{call}");
                }
            }
        }
    }
}
