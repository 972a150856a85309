//! What the emulated operators of causal convolution share.

use super::declared::{DeclaredOperator, Launch, ParameterOf};
use crate::elements::{Elements, Reader};
use crate::finding_kind::FindingKind;
use crate::kernel::convolution::{self, Buffers};
use crate::kernel::element_view::ElementView;
use crate::status::Outcome;
use ascend_spec::operator::ArgumentList as _;
use ascend_spec::ops::convolution::{ConvContents, ConvFault, ConvProblem, ConvRun};
use ascend_spec::{DType, Dims, TensorDesc};
use std::ops::Range;

/// The parameters of an operator that its kernel reads and writes; one that works in place writes `x`.
pub(super) struct Parameters<P> {
    pub(super) x: P,
    pub(super) weight: P,
    pub(super) bias: Option<P>,
    pub(super) conv_states: P,
    pub(super) y: P,
}

/// An operator of causal convolution, with `N` tensors of numbers that lead to rows and lines.
pub(super) trait ConvOperator<const N: usize>: DeclaredOperator {
    const PARAMETERS: Parameters<ParameterOf<Self>>;
    const CONTENTS: [ParameterOf<Self>; N];

    fn problem(&self) -> &ConvProblem;

    /// What the numbers of the tensors of `CONTENTS` are.
    fn contents(numbers: &[Vec<i64>; N]) -> ConvContents<'_>;

    fn tensor(&self, parameter: ParameterOf<Self>) -> Option<&TensorDesc> {
        self.arguments().tensors(parameter).first()
    }

    /// The numbers of the tensors of `CONTENTS`.
    ///
    /// # Errors
    /// A device fault if there is no host memory for them.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn numbers(&self, launch: &Launch<'_, Self>) -> Outcome<[Vec<i64>; N]> {
        let mut numbers = [const { Vec::new() }; N];
        for (parameter, numbers) in Self::CONTENTS.into_iter().zip(&mut numbers) {
            *numbers = match self.tensor(parameter) {
                Some(desc) if desc.dtype == DType::Bool => {
                    // SAFETY: the caller's promise.
                    let flags = unsafe { launch.bytes(parameter, *desc) }?;
                    flags.into_iter().map(i64::from).collect()
                }
                // SAFETY: the caller's promise.
                _ => unsafe { launch.integers(parameter) }?,
            };
        }
        Ok(numbers)
    }

    /// Some rows of `x` or `y`.
    fn rows(&self, parameter: ParameterOf<Self>, rows: Range<usize>, launch: &Launch<'_, Self>) -> Option<Elements> {
        let desc = self.tensor(parameter)?;
        let (&channels, &[.., apart, next]) = (desc.shape.last()?, &desc.strides[..]) else {
            return None;
        };
        let each = desc.shape[desc.shape.rank() - 2];
        if desc.shape.rank() == 3 && desc.strides[0] != apart.checked_mul(each)? {
            // Rows at unequal distances are read as they are described.
            return Elements::described(launch.named(parameter), desc);
        }
        self.part(parameter, (desc.offset, rows), [apart, next], channels, launch)
    }

    /// Some rows of a line of the pool.
    fn line(&self, line: usize, rows: Range<usize>, launch: &Launch<'_, Self>) -> Option<Elements> {
        let parameter = Self::PARAMETERS.conv_states;
        let desc = self.tensor(parameter)?;
        let (&channels, &[lines, apart, next]) = (desc.shape.last()?, &desc.strides[..]) else {
            return None;
        };
        let offset = desc.offset.checked_add(i64::try_from(line).ok()?.checked_mul(lines)?)?;
        self.part(parameter, (offset, rows), [apart, next], channels, launch)
    }

    /// Rows of a tensor, of which the row 0 is at `offset`.
    fn part(
        &self,
        parameter: ParameterOf<Self>,
        (offset, rows): (i64, Range<usize>),
        strides: [i64; 2],
        channels: i64,
        launch: &Launch<'_, Self>,
    ) -> Option<Elements> {
        let [first, count] = [rows.start, rows.len()].map(|rows| i64::try_from(rows).unwrap_or(i64::MAX));
        let offset = offset.checked_add(first.checked_mul(strides[0])?)?;
        let (shape, strides) = (Dims::of([count, channels]), Dims::of(strides));
        let desc = TensorDesc { shape, strides, offset, ..*self.tensor(parameter)? };
        Elements::described(launch.named(parameter), &desc)
    }

    /// Passes to the reader the weights, the bias, the rows that sequences have, and those of lines that they go on
    /// from.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn read_runs(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise. Without host memory for the numbers the launch fails.
        let numbers = unsafe { self.numbers(launch) }.unwrap_or([const { Vec::new() }; N]);
        let mut read = |elements: Option<Elements>| {
            let unknown = elements.filter(|elements| !reader.knows(elements.bounds()));
            unknown.iter().for_each(|elements| reader.read(elements));
        };
        let whole = |parameter: ParameterOf<Self>| {
            let desc = self.tensor(parameter)?;
            Elements::described(launch.named(parameter), desc)
        };
        read(whole(Self::PARAMETERS.weight));
        read(Self::PARAMETERS.bias.and_then(whole));
        for run in self.problem().runs(Self::contents(&numbers)).filter_map(Result::ok) {
            read(self.rows(Self::PARAMETERS.x, run.rows.clone(), launch));
            if let Some(line) = run.history {
                // Older rows of a line are moved within it, whatever they are.
                let own = run.first_row.saturating_add(self.problem().front());
                read(self.line(line, run.first_row..own, launch));
            }
        }
    }

    /// Visits the outputs of the rows that sequences have, and the rows of lines that are written.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::run`].
    unsafe fn write_runs(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise. Without host memory for the numbers the launch fails.
        let numbers = unsafe { self.numbers(launch) }.unwrap_or([const { Vec::new() }; N]);
        for run in self.problem().runs(Self::contents(&numbers)).filter_map(Result::ok) {
            self.rows(Self::PARAMETERS.y, run.rows.clone(), launch).iter().for_each(&mut *visit);
            for kept in &run.kept {
                let rows = kept.row..kept.row.saturating_add(kept.padded.len());
                self.line(kept.line, rows, launch).iter().for_each(&mut *visit);
            }
        }
    }

    /// Convolves the rows of the call.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn convolve(&self, launch: &Launch<'_, Self>) -> Outcome {
        let Parameters { x, weight, bias, conv_states, y } = Self::PARAMETERS;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the tensors that are written share no memory with them.
        let numbers = unsafe { self.numbers(launch) }?;
        let (runs, shared) = checked_runs(launch, self.problem(), Self::contents(&numbers))?;
        let elements = |parameter| Some(ElementView::new(launch.first(parameter), *self.tensor(parameter)?));
        let dtype = self.tensor(x).map_or(DType::Bf16, |x| x.dtype);
        let (Some(x), Some(weight), Some(lines), Some(y)) =
            (elements(x), elements(weight), elements(conv_states), elements(y))
        else {
            return Ok(());
        };
        let buffers = Buffers { x, weight, bias: bias.and_then(elements), lines, y };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found what is written apart
        // from everything else; the runs keep to the rows and to the pool, `ConvProblem::runs` takes none that begins
        // within another's rows, and `shared` says whether one writes a line that another one has.
        unsafe { convolution::run(self.problem(), dtype, (&runs, shared), &buffers) };
        Ok(())
    }
}

/// The sequences of a launch whose numbers lead to their own rows and lines, and whether two of them share a line. What
/// leads elsewhere is reported, which is a device fault in strict mode.
fn checked_runs<O: DeclaredOperator>(
    launch: &Launch<'_, O>,
    problem: &ConvProblem,
    contents: ConvContents<'_>,
) -> Outcome<(Vec<ConvRun>, bool)> {
    launch.runs(problem.runs(contents), problem.shared_line(contents), |fault| {
        let kind = match fault {
            ConvFault::NoLine { .. } => FindingKind::SlotOutOfRange,
            ConvFault::SharedLine { .. } => FindingKind::DuplicateSlot,
            _ => FindingKind::SequenceLength,
        };
        (kind, fault.tensor())
    })
}

/// [`ConvOperator`] and `DeclaredOperator` of an operator that [`checked_call!`](super::checked_call::checked_call)
/// makes of a call. `$numbers` is the call whose numbers it has, `$y` the parameter that is written.
macro_rules! convolves {
    (
        $operator:ident of $call:ident,
        numbers of $numbers:ident, bias $bias:expr, y $y:ident, updates $($updated:ident)+
    ) => {
        impl ConvOperator<{ $call::CONTENTS.len() }> for $operator {
            const PARAMETERS: Parameters<Parameter> = Parameters {
                x: Parameter::X,
                weight: Parameter::Weight,
                bias: $bias,
                conv_states: Parameter::ConvStates,
                y: Parameter::$y,
            };
            const CONTENTS: [Parameter; $call::CONTENTS.len()] = $call::CONTENTS;

            fn problem(&self) -> &ConvProblem {
                &self.problem
            }

            fn contents(
                numbers: &[Vec<i64>; $call::CONTENTS.len()],
            ) -> ascend_spec::ops::convolution::ConvContents<'_> {
                $numbers::contents(numbers)
            }
        }

        impl DeclaredOperator for $operator {
            declared_by_problem! {}

            const UPDATED: &'static [Parameter] = &[$(Parameter::$updated),+];

            unsafe fn reads(&self, launch: &Launch<'_, Self>, reader: &mut dyn Reader) {
                // SAFETY: the caller's promise.
                unsafe { self.read_runs(launch, reader) };
            }

            unsafe fn writes(&self, launch: &Launch<'_, Self>, visit: &mut dyn FnMut(&Elements)) {
                // SAFETY: the caller's promise.
                unsafe { self.write_runs(launch, visit) };
            }

            unsafe fn compute(&self, launch: &Launch<'_, Self>) -> $crate::status::Outcome {
                // SAFETY: the caller's promise.
                unsafe { self.convolve(launch) }
            }
        }
    };
}

pub(super) use convolves;
