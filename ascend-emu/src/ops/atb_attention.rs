//! PagedAttention and SelfAttention of ATB.

use super::attention::{Attention, AttentionCall, TruthValues};
use super::declared::Launch;
use crate::host_memory::try_repeat;
use crate::status::Outcome;
use ascend_spec::attention_problem::{AttentionProblem, MaskTensor, MaskUse};
use ascend_spec::ops::atb_attention::{Arguments, Hiding, Parameter, Tiles};
use ascend_spec::{DType, TensorDesc};
use half::{bf16, f16};

/// A call of one of the operators that holds every rule.
pub(crate) type AtbAttention = Attention<Arguments<TensorDesc>>;

impl AttentionCall for Arguments<TensorDesc> {
    unsafe fn truth_values(launch: &Launch<'_, AtbAttention>) -> Outcome<Option<TruthValues>> {
        let op = launch.op;
        let (Some(problem), Some(mask)) = (&op.problem, op.arguments.mask) else {
            return Ok(None);
        };
        let numbers = Numbers {
            launch,
            first: launch.first(Parameter::Mask).cast::<u16>(),
            elements: elements(&mask),
            dtype: mask.dtype,
            times_lowest: op.arguments.call().times_lowest(op.version),
        };
        let tiles = Tiles::of(problem, op.version);
        match problem.mask {
            MaskUse::Full(places) => {
                let skipping = op.arguments.call().skips_tiles(op.target).then_some(tiles);
                // SAFETY: the caller's promise.
                unsafe { of_full(problem, places, &numbers, skipping) }.map(Some)
            }
            // SAFETY: the caller's promise.
            MaskUse::Compressed => unsafe { of_square(problem, &numbers, tiles) },
            _ => Ok(None),
        }
    }
}

/// The numbers of a launch's mask.
struct Numbers<'a> {
    launch: &'a Launch<'a, AtbAttention>,
    first: *const u16,
    elements: usize,
    dtype: DType,
    times_lowest: bool,
}

impl Numbers<'_> {
    /// Whether the number at a place hides the key from the row.
    ///
    /// # Safety
    ///
    /// The mask of the launch may be read.
    unsafe fn hides(&self, place: usize, row: usize, key: usize) -> Outcome<bool> {
        if place >= self.elements {
            return Err(self.launch.fault(format_args!("mask: there is no number for row {row} and key {key}")));
        }
        // SAFETY: the place is one of the mask's elements, which may be read. Alignment is not required.
        let bits = unsafe { self.first.add(place).read_unaligned() };
        let number = match self.dtype {
            DType::Bf16 => bf16::from_bits(bits).to_f32(),
            _ => f16::from_bits(bits).to_f32(),
        };
        match Hiding::of(number, self.times_lowest) {
            Hiding::Shows => Ok(false),
            Hiding::Hides => Ok(true),
            Hiding::Weighs => {
                let hides = if self.times_lowest { "1 or more" } else { "-10000 or less" };
                Err(self.launch.fault(format_args!(
                    "mask: {number} for row {row} and key {key} is not emulated: 0 shows a key, and {hides} hides it"
                )))
            }
        }
    }

    /// A truth value for each of `len` places, all 0.
    fn zeros(&self, len: usize) -> Outcome<Vec<u8>> {
        try_repeat(0u8, len).map_err(|why| self.launch.fault(why))
    }
}

fn elements(desc: &TensorDesc) -> usize {
    usize::try_from(desc.elements().unwrap_or(0)).unwrap_or(usize::MAX)
}

/// The most rows and the most keys of a sequence.
fn longest(problem: &AttentionProblem<'_>) -> (usize, usize) {
    (0..problem.batch).fold((0, 0), |(rows, keys), b| (rows.max(problem.q_len(b)), keys.max(problem.kv_len(b))))
}

/// Truth values of a mask with a number for each row and key, which also hide the keys of tiles that are skipped.
///
/// # Safety
///
/// The mask of the launch may be read.
unsafe fn of_full(
    problem: &AttentionProblem<'_>,
    places: MaskTensor,
    numbers: &Numbers<'_>,
    skipping: Option<Tiles>,
) -> Outcome<TruthValues> {
    let mut values = numbers.zeros(numbers.elements)?;
    let masks = if places.batch == 0 { 1 } else { problem.batch };
    for sequence in 0..masks {
        let (rows, keys) = match places.batch {
            0 => longest(problem),
            _ => (problem.q_len(sequence), problem.kv_len(sequence)),
        };
        let start = sequence.saturating_mul(places.batch as usize);
        for (row, key) in (0..rows).flat_map(|row| (0..keys).map(move |key| (row, key))) {
            let place = start + row * places.row as usize + key;
            let skipped = skipping.is_some_and(|tiles| tiles.skips(row, key));
            // SAFETY: the caller's promise.
            let hidden = skipped || unsafe { numbers.hides(place, row, key) }?;
            if let Some(value) = values.get_mut(place) {
                *value = hidden.into();
            }
        }
    }
    Ok(TruthValues { values, places })
}

/// Truth values for each row and key of each sequence from a square that stands for them; `None` where it hides later
/// keys and shows the others, for which the problem has a mode.
///
/// # Safety
///
/// The mask of the launch may be read.
unsafe fn of_square(
    problem: &AttentionProblem<'_>,
    numbers: &Numbers<'_>,
    tiles: Tiles,
) -> Outcome<Option<TruthValues>> {
    const COLUMNS: usize = 128;
    let (rows, keys) = longest(problem);
    let side = tiles.side();
    let (read_rows, read_keys) = (rows.min(side), keys.min(side));
    let mut square = numbers.zeros(side * side)?;
    let mut is_triangle = true;
    for (row, key) in (0..read_rows).flat_map(|row| (0..read_keys).map(move |key| (row, key))) {
        // SAFETY: the caller's promise.
        let hidden = unsafe { numbers.hides(row * COLUMNS + key, row, key) }?;
        is_triangle &= hidden == (key > row);
        square[row * side + key] = hidden.into();
    }
    if is_triangle {
        return Ok(None);
    }
    let of_sequence = rows.saturating_mul(keys);
    let mut values = numbers.zeros(of_sequence.saturating_mul(problem.batch))?;
    let hides = |row: usize, key: usize| square.get(row * side + key).is_some_and(|&hides| hides != 0);
    for sequence in 0..problem.batch {
        let lengths = (problem.q_len(sequence), problem.kv_len(sequence));
        for row in 0..lengths.0 {
            let start = sequence * of_sequence + row * keys;
            let of_row = values.iter_mut().skip(start).take(lengths.1);
            for (key, value) in of_row.enumerate() {
                *value = tiles.square_hides((row, key), lengths, hides).into();
            }
        }
    }
    let stride = |elements: usize| i64::try_from(elements).unwrap_or(i64::MAX);
    Ok(Some(TruthValues {
        values,
        places: MaskTensor { offset: 0, batch: stride(of_sequence), row: stride(keys), key: 1 },
    }))
}
