//! Rows that a call computed, and how two computations of them differ.

use ascend_attention::case::CaseTensor;
use ascend_attention::spec::DType;
use ascend_attention::spec::attention_problem::Rows;
use ascend_attention::{bf16, f16};

use super::sequences::Sequences;

/// The rows of all sequences that a call computed, by output.
pub(super) struct ComputedRows(Vec<OutputRows>);

/// One output's rows.
struct OutputRows {
    output: &'static str,
    dtype: DType,
    /// Number of elements in a row.
    dim: usize,
    /// The elements of each sequence: token by token, and within a token head by head.
    sequences: Vec<Vec<f32>>,
}

impl ComputedRows {
    /// The rows in the outputs of a case's call.
    ///
    /// # Errors
    /// An output that is missing or cannot be read.
    pub(super) fn of(sequences: &Sequences, outputs: &[(&'static str, CaseTensor)]) -> Result<Self, String> {
        let problem = &sequences.problem;
        let lse = problem.lse.map(|rows| ("softmax_lse", rows, 1));
        let written = [Some(("attention_out", problem.out, problem.value_dim)), lse];
        let read = |(output, rows, dim): (&'static str, _, usize)| {
            let missing = || format!("no numbers of {output} came out");
            let tensor = outputs.iter().find(|(name, _)| *name == output);
            let (_, tensor) = tensor.ok_or_else(missing)?;
            let values = tensor.to_f32().ok_or_else(missing)?;
            Self::read(sequences, &values, rows, dim)
                .map(|sequences| OutputRows { output, dtype: tensor.dtype(), dim, sequences })
                .ok_or_else(missing)
        };
        let outputs = written.into_iter().flatten().map(read);
        Ok(Self(outputs.collect::<Result<_, _>>()?))
    }

    fn read(sequences: &Sequences, values: &[f32], rows: Rows, dim: usize) -> Option<Vec<Vec<f32>>> {
        let problem = &sequences.problem;
        let of_sequence = |b: usize| {
            let at = sequences.rows(b);
            let batch = if problem.packed { 0 } else { b };
            let mut found = Vec::with_capacity(at.q_len * problem.heads * dim);
            for row in at.q_first..at.q_first + at.q_len {
                for head in 0..problem.heads {
                    for d in 0..dim {
                        let element = rows.element((batch, head, row), d);
                        found.push(*values.get(usize::try_from(element).ok()?)?);
                    }
                }
            }
            Some(found)
        };
        (0..problem.batch).map(of_sequence).collect()
    }
}

/// The place and the numbers of an element that differs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Offender {
    pub(super) output: &'static str,
    pub(super) sequence: usize,
    pub(super) token: usize,
    pub(super) head: usize,
    pub(super) element: usize,
    pub(super) before: f32,
    pub(super) after: f32,
}

/// How the rows of two computations differ.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Difference {
    /// Rows that were compared: one for each token, head and output.
    pub(super) rows: usize,
    /// Number of rows with an element that has other bits.
    pub(super) differing: usize,
    /// The largest difference of two elements in units in the last place of the output's type, if that is FLOAT,
    /// FLOAT16 or BF16.
    pub(super) ulps: u64,
    /// The largest absolute difference of two elements; infinite if only one of them is NaN.
    pub(super) distance: f64,
    /// The first of the elements that differ.
    pub(super) first: Option<Offender>,
}

impl Difference {
    /// Compares the rows of one sequence: those from `token` on in `before`, and all of sequence `of` in `after`.
    ///
    /// # Errors
    /// The rows differ in number, or belong to different outputs.
    pub(super) fn add(
        &mut self,
        before: &ComputedRows,
        (sequence, token): (usize, usize),
        after: &ComputedRows,
        other: usize,
        heads: usize,
    ) -> Result<(), String> {
        let outputs = |rows_computed: &ComputedRows| rows_computed.0.iter().map(|rows| rows.output).collect::<Vec<_>>();
        if outputs(before) != outputs(after) {
            return Err(format!("the calls have the outputs {:?} and {:?}", outputs(before), outputs(after)));
        }
        for (old, new) in before.0.iter().zip(&after.0) {
            let dim = old.dim;
            let first = token * heads * dim;
            let new = new.sequences.get(other).map(Vec::as_slice).unwrap_or_default();
            let old_rows = old.sequences.get(sequence).and_then(|rows| rows.get(first..));
            let old_rows = old_rows.and_then(|rows| rows.get(..new.len()));
            let old_rows = old_rows.ok_or("the calls compute other numbers of rows")?;
            let rows = old_rows.chunks(dim.max(1)).zip(new.chunks(dim.max(1)));
            for (row, (was, is)) in rows.enumerate() {
                self.rows += 1;
                let mut differs = false;
                for (element, (&before, &after)) in was.iter().zip(is).enumerate() {
                    if before.to_bits() == after.to_bits() {
                        continue;
                    }
                    differs = true;
                    self.ulps = self.ulps.max(ulps(old.dtype, before, after));
                    let distance = f64::from(before) - f64::from(after);
                    let distance = if distance.is_nan() { f64::INFINITY } else { distance.abs() };
                    self.distance = self.distance.max(distance);
                    self.first.get_or_insert(Offender {
                        output: old.output,
                        sequence,
                        token: token + row / heads.max(1),
                        head: row % heads.max(1),
                        element,
                        before,
                        after,
                    });
                }
                self.differing += usize::from(differs);
            }
        }
        Ok(())
    }
}

/// The number of representable steps of a type between two numbers; 0 for types that are not counted.
fn ulps(dtype: DType, one: f32, other: f32) -> u64 {
    // Maps numbers to integers in the same order, with both zeros at 0.
    let ordered = |bits: u32, sign: u32| {
        let size = i64::from(bits & !sign);
        if bits & sign == 0 { size } else { -size }
    };
    let place = |x: f32| match dtype {
        DType::Float16 => ordered(u32::from(f16::from_f32(x).to_bits()), 1 << 15),
        DType::Bf16 => ordered(u32::from(bf16::from_f32(x).to_bits()), 1 << 15),
        DType::Float => ordered(x.to_bits(), 1 << 31),
        _ => 0,
    };
    place(one).abs_diff(place(other))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn computed(values: &[f32]) -> ComputedRows {
        ComputedRows(vec![OutputRows {
            output: "attention_out",
            dtype: DType::Float16,
            dim: 2,
            sequences: vec![values.to_vec()],
        }])
    }

    #[test]
    fn differences_are_counted_by_row_and_placed() {
        // Three tokens of two heads.
        let before = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0];
        let mut after = before;
        after[6] = 6.003_906_3;
        after[7] = -7.0;
        let mut all = Difference::default();
        let (old, new) = (computed(&before), computed(&after));
        all.add(&old, (0, 0), &new, 0, 2).unwrap();
        assert_eq!((all.rows, all.differing), (6, 1));
        assert_eq!(all.distance, 14.0);
        let first = all.first.unwrap();
        assert_eq!((first.token, first.head, first.element), (1, 1, 0));
        assert_eq!((first.before, first.after), (6.0, 6.003_906_3));
        // A part of the rows, compared with a call that computes only these.
        let mut part = Difference::default();
        let tail = computed(&after[8..]);
        part.add(&old, (0, 2), &tail, 0, 2).unwrap();
        assert_eq!((part.rows, part.differing, part.first), (2, 0, None));
        let fewer = part.add(&tail, (0, 0), &old, 0, 2).unwrap_err();
        assert_eq!(fewer, "the calls compute other numbers of rows");
        let none = part.add(&old, (0, 0), &ComputedRows(Vec::new()), 0, 2);
        assert!(none.unwrap_err().contains("attention_out"));
    }

    #[test]
    fn ulps_count_numbers_of_the_outputs_type() {
        let one = f16::from_bits(0x3c00).to_f32();
        let next = f16::from_bits(0x3c01).to_f32();
        assert_eq!(ulps(DType::Float16, one, next), 1);
        assert_eq!(ulps(DType::Bf16, -1.0, 1.0), 2 * 0x3f80);
        assert_eq!(ulps(DType::Float, 0.0, -0.0), 0);
        assert_eq!(ulps(DType::Float, 1.0, f32::from_bits(0x3f80_0003)), 3);
        assert_eq!(ulps(DType::Int8, 1.0, 5.0), 0);
    }

    #[test]
    fn nan_against_a_number_is_infinitely_far() {
        let mut difference = Difference::default();
        let (one, other) = (computed(&[f32::NAN, 1.0]), computed(&[0.0, 1.0]));
        difference.add(&one, (0, 0), &other, 0, 1).unwrap();
        assert_eq!(difference.distance, f64::INFINITY);
        let mut same = Difference::default();
        same.add(&one, (0, 0), &one, 0, 1).unwrap();
        assert_eq!(same.differing, 0);
    }
}
