//! Masks of ATB's SelfAttention: what their numbers do, for each kernel.

use crate::atb::{FLOAT16, ND, on_device, on_host, run};
use crate::bench::*;
use ascend_emu::atb::{Operation, OperationParameters, Version};
use half::f16;

const INT32: i32 = 3;
const HEADS: usize = 2;

/// A call of SelfAttention with one key head, and the numbers of its mask.
struct Masked {
    version: Version,
    compressed: bool,
    triangle: bool,
    precise: bool,
    dim: usize,
    rows: Vec<i32>,
    key_lens: Vec<i32>,
    shape: Vec<i64>,
    numbers: Vec<f16>,
}

impl Masked {
    /// Packed sequences of as many keys as rows under a square with this number where a key is later.
    fn square(rows: &[i32], number: f32) -> Self {
        Masked {
            version: Version::Packed,
            compressed: true,
            triangle: true,
            precise: false,
            dim: 32,
            rows: rows.to_vec(),
            key_lens: rows.to_vec(),
            shape: vec![128, 128],
            numbers: triangle(128, number),
        }
    }

    /// Runs the call and compares it with attention over the keys that each row of each sequence sees.
    fn computes(&self, sees: impl Fn(usize, usize, usize) -> bool) {
        let _bench = Bench::new();
        let got = self.run().unwrap_or_else(|text| panic!("{text}"));
        let width = HEADS * self.dim;
        let mut start = 0;
        for (sequence, (&rows, &keys)) in self.rows.iter().zip(&self.key_lens).enumerate() {
            for row in 0..rows as usize {
                let seen: Vec<_> = (0..keys as usize).filter(|&key| sees(sequence, row, key)).collect();
                // Scores are equal, so that a row is the mean of what it sees.
                let mean = seen.iter().map(|&key| value(sequence, key)).sum::<f64>() / seen.len() as f64;
                for element in 0..width {
                    let got = got[(start + row) * width + element].to_f64();
                    assert!((got - mean).abs() < 4e-3, "{sequence} {row}: {got} for {mean}");
                }
            }
            start += rows as usize;
        }
    }

    fn run(&self) -> Result<Vec<f16>, String> {
        let tokens: i32 = self.rows.iter().sum();
        let shape = [tokens.into(), HEADS as i64, self.dim as i64];
        let len = tokens as usize * HEADS * self.dim;
        let query = upload(&vec![f16::ZERO; len]);
        let out = upload(&vec![f16::NAN; len]);
        let (kv, kv_shape, table) = self.keys_and_table();
        let values = upload(&kv);
        let mask = upload(&self.numbers);
        let batch = [self.rows.len() as i64];
        let table_at = upload(&table);
        let table_shape = [batch[0], table.len() as i64 / batch[0]];
        let given = |shape, at| on_device(FLOAT16, ND, shape, at);
        let mut inputs = vec![given(&shape, query), given(&kv_shape, values), given(&kv_shape, values)];
        let (both, pair) = ([self.rows.clone(), self.key_lens.clone()].concat(), [2, batch[0]]);
        if self.version == Version::Prefix {
            inputs.push(on_device(INT32, ND, &table_shape, table_at));
        }
        inputs.push(given(&self.shape, mask));
        match self.version {
            Version::Prefix => inputs.extend([on_host(&batch, &self.rows), on_host(&batch, &self.key_lens)]),
            _ => inputs.push(on_host(&pair, &both)),
        }
        let parameters = OperationParameters {
            version: self.version,
            heads: HEADS as i32,
            kv_heads: 1,
            scale: 1.0,
            masked: true,
            triangle: self.triangle,
            precise: self.precise,
            other_output: false,
            clamped: false,
        };
        let operation = Operation::Attention { parameters, compressed: self.compressed };
        let outcome = run(operation, &inputs, &[given(&shape, out)]);
        let got = outcome.map(|()| download::<f16>(out, len)).map_err(|refusal| refusal.message);
        for memory in [query, out, values, mask, table_at] {
            free(memory);
        }
        got
    }

    /// Keys, which are their values, with their shape, and the blocks of each sequence.
    fn keys_and_table(&self) -> (Vec<f16>, Vec<i64>, Vec<i32>) {
        let row = |sequence, key| vec![f16::from_f64(value(sequence, key)); self.dim];
        let lens = self.key_lens.iter().map(|&len| len as usize).enumerate();
        match self.version {
            Version::Packed => {
                let keys = lens.flat_map(|(sequence, len)| (0..len).flat_map(move |key| row(sequence, key)));
                let keys: Vec<_> = keys.collect();
                let tokens = keys.len() as i64 / self.dim as i64;
                (keys, vec![tokens, 1, self.dim as i64], vec![0; self.rows.len()])
            }
            _ => {
                let blocks = self.key_lens.iter().map(|len| (*len as usize).div_ceil(128)).max().unwrap();
                let keys = lens.flat_map(|(sequence, _)| (0..blocks * 128).flat_map(move |key| row(sequence, key)));
                let all = blocks * self.rows.len();
                let shape = vec![all as i64, 128, 1, self.dim as i64];
                (keys.collect(), shape, (0..all as i32).collect())
            }
        }
    }
}

/// The value of a key: another one for each of some hundred, so that means differ.
fn value(sequence: usize, key: usize) -> f64 {
    f64::from(((key * 37 + sequence * 11) % 101) as u32) / 16.0
}

/// A square with a number where the column is behind the row.
fn triangle(side: usize, number: f32) -> Vec<f16> {
    let places = (0..side).flat_map(|row| (0..side).map(move |key| key > row));
    places.map(|later| f16::from_f32(if later { number } else { 0.0 })).collect()
}

#[test]
fn a_strict_triangle_is_causal() {
    Masked::square(&[200, 20], -10_000.0).computes(|_, row, key| key <= row);
    let plain = Masked { compressed: false, ..Masked::square(&[130], f32::NEG_INFINITY) };
    plain.computes(|_, row, key| key <= row);
}

#[test]
fn zeros_hide_nothing_in_a_row_s_own_tile() {
    Masked::square(&[20, 128], 0.0).computes(|_, _, _| true);
    Masked::square(&[300], 0.0).computes(|_, row, key| key / 128 <= row / 128);
    let wide = Masked { dim: 256, ..Masked::square(&[200], 0.0) };
    wide.computes(|_, row, key| key / 64 <= row / 64);
}

#[test]
fn other_numbers_are_read_by_tiles() {
    let mut masked = Masked::square(&[150, 40], -10_000.0);
    for row in 1..128 {
        masked.numbers[row * 128] = f16::from_f32(-10_000.0);
    }
    // The first key of each tile is hidden from the others of its rows.
    let sees =
        |_, row: usize, key: usize| key <= row && (!key.is_multiple_of(128) || key == row || key / 128 < row / 128);
    masked.computes(sees);
}

#[test]
fn high_precision_multiplies_and_a_prefix_adds() {
    let precise = Masked { precise: true, ..Masked::square(&[200], 1.0) };
    precise.computes(|_, row, key| key <= row);
    let bench = Bench::new();
    let added = Masked { precise: true, ..Masked::square(&[20], -10_000.0) };
    let text = added.run().unwrap_err();
    assert!(text.contains("-10000 for row 0 and key 1 is not emulated"), "{text}");
    drop(bench);
    let prefix = |number| Masked {
        version: Version::Prefix,
        precise: true,
        key_lens: vec![145, 130],
        ..Masked::square(&[17, 130], number)
    };
    let lead = |sequence: usize| [128, 0][sequence];
    prefix(-10_000.0).computes(|sequence, row, key| key <= row + lead(sequence));
    prefix(0.0).computes(|sequence, row, key| key < lead(sequence) || (key - lead(sequence)) / 128 <= row / 128);
}

#[test]
fn a_full_mask_is_read_but_for_tiles_that_are_skipped() {
    let full = |triangle, numbers| Masked {
        compressed: false,
        triangle,
        shape: vec![300, 300],
        numbers,
        ..Masked::square(&[300, 140], 0.0)
    };
    let zeros = vec![f16::ZERO; 300 * 300];
    full(false, zeros.clone()).computes(|_, _, _| true);
    full(true, zeros).computes(|_, row, key| key / 128 <= row / 128);
    full(true, triangle(300, -10_000.0)).computes(|_, row, key| key <= row);
}
