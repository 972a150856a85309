//! CausalConv1d as an operator of the emulator.

use super::checked_call::{checked_call, declared_by_problem};
use super::declared::DeclaredOperator;
use super::launch::{Launch, bytes, integers, refuse_two_places};
use crate::elements::{Elements, Reader};
use crate::fault::Fault;
use crate::finding_kind::FindingKind;
use crate::host_memory::HostMemoryExhausted;
use crate::kernel::causal_conv1d::{self, Buffers};
use crate::kernel::element_view::ElementView;
use crate::memory::DeviceMemory;
use crate::operator::Addresses;
use ascend_spec::operator::WalkedTensors as _;
use ascend_spec::ops::causal_conv1d::{
    Argument, Arguments, CausalConvCall, ConvContents, ConvFault, ConvProblem, ConvRun, Parameter, Version,
};
use ascend_spec::{DType, Dims, TensorDesc, causal_conv1d_arguments};
use std::ops::Range;

checked_call! { CausalConvOperator: ConvProblem, target }

/// The numbers of a launch that are known on the device alone.
type Numbers = [Vec<i64>; 4];

fn contents([starts, lines, initial_state_mode, accepted]: &Numbers) -> ConvContents<'_> {
    ConvContents { starts, lines, initial_state_mode, accepted }
}

impl CausalConvOperator {
    /// Starts, lines, which sequences go on, and accepted counts.
    ///
    /// # Errors
    /// There is no host memory for them.
    ///
    /// # Safety
    ///
    /// As for [`DeclaredOperator::compute`].
    unsafe fn numbers(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<Numbers, HostMemoryExhausted> {
        let mut numbers = Numbers::default();
        for (parameter, numbers) in CausalConvCall::CONTENTS.into_iter().zip(&mut numbers) {
            *numbers = match self.arguments.tensor(parameter) {
                Some(desc) if desc.dtype == DType::Bool => {
                    // SAFETY: the caller's promise.
                    let flags = unsafe { bytes(self, memory, addresses, parameter, *desc) }?;
                    flags.into_iter().map(i64::from).collect()
                }
                // SAFETY: the caller's promise.
                _ => unsafe { integers(self, memory, addresses, parameter) }?,
            };
        }
        Ok(numbers)
    }

    /// Some rows of a tensor whose rows are channels.
    fn rows(&self, parameter: Parameter, rows: Range<usize>, addresses: &Addresses) -> Option<Elements> {
        let desc = self.arguments.tensor(parameter)?;
        let channels = desc.shape.last().copied()?;
        let [first, count] = [rows.start, rows.len()].map(|rows| i64::try_from(rows).unwrap_or(i64::MAX));
        let desc = match desc.shape.rank() {
            2 => TensorDesc { shape: Dims::of([count, channels]), ..*desc },
            // What is written is contiguous, and of `x` the sequences of three axes are read as they are described.
            _ if desc.is_contiguous() => {
                let offset = desc.offset;
                TensorDesc { offset, ..TensorDesc::packed(desc.dtype, Dims::of([count, channels])) }
            }
            _ => return Elements::described(self.named(parameter.into(), addresses), desc),
        };
        let offset = desc.offset.checked_add(first.checked_mul(*desc.strides.first()?)?)?;
        Elements::described(self.named(parameter.into(), addresses), &TensorDesc { offset, ..desc })
    }

    /// The rows of the pool that are those of a line.
    fn line(&self, run: &ConvRun, rows: Range<usize>) -> Range<usize> {
        let first = run.line.saturating_mul(self.problem.line_rows);
        first.saturating_add(rows.start)..first.saturating_add(rows.end)
    }
}

/// The sequences of a launch whose numbers lead to their own rows and lines, and whether two of them share a line. What
/// leads elsewhere is reported, which is a device fault in strict mode.
fn checked_runs(
    launch: &Launch<'_, CausalConvOperator>,
    problem: &ConvProblem,
    contents: ConvContents<'_>,
) -> Result<(Vec<ConvRun>, bool), Fault> {
    launch.runs(problem.runs(contents), problem.shared_line(contents), |fault| {
        let kind = match fault {
            ConvFault::Starts { .. } | ConvFault::Accepted { .. } | ConvFault::FullLine { .. } => {
                FindingKind::SequenceLength
            }
            ConvFault::NoLine { .. } => FindingKind::SlotOutOfRange,
            ConvFault::SharedLine { .. } => FindingKind::DuplicateSlot,
        };
        (kind, fault.tensor())
    })
}

impl DeclaredOperator for CausalConvOperator {
    declared_by_problem! {}

    unsafe fn reads(&self, addresses: &Addresses, memory: &DeviceMemory, reader: &mut dyn Reader) {
        // SAFETY: the caller's promise. Without host memory for the numbers the launch fails.
        let numbers = unsafe { self.numbers(addresses, memory) }.unwrap_or_default();
        let mut read = |elements: Option<Elements>| {
            let unknown = elements.filter(|elements| !reader.knows(elements.bounds()));
            unknown.iter().for_each(|elements| reader.read(elements));
        };
        let whole = |parameter: Parameter| {
            let desc = self.arguments.tensor(parameter)?;
            Elements::described(self.named(parameter.into(), addresses), desc)
        };
        read(whole(Parameter::Weight));
        read(whole(Parameter::Bias));
        for run in self.problem.runs(contents(&numbers)).filter_map(Result::ok) {
            read(self.rows(Parameter::X, run.rows.clone(), addresses));
            if let Some(first) = run.first_row {
                let rows = self.line(&run, first..first.saturating_add(self.problem.width.saturating_sub(1)));
                read(self.rows(Parameter::ConvStates, rows, addresses));
            }
        }
    }

    unsafe fn writes(&self, addresses: &Addresses, memory: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // SAFETY: the caller's promise. Without host memory for the numbers the launch fails.
        let numbers = unsafe { self.numbers(addresses, memory) }.unwrap_or_default();
        for run in self.problem.runs(contents(&numbers)).filter_map(Result::ok) {
            self.rows(Parameter::Y, run.rows.clone(), addresses).iter().for_each(&mut *visit);
            if self.problem.writes_line(&run) {
                let rows = self.line(&run, 0..run.kept.len());
                self.rows(Parameter::ConvStates, rows, addresses).iter().for_each(&mut *visit);
            }
        }
    }

    unsafe fn compute(&self, addresses: &Addresses, memory: &DeviceMemory) -> Result<(), Fault> {
        let Arguments { x: Some(x), weight: Some(weight), conv_states: Some(states), y: Some(y), bias, .. } =
            &self.arguments
        else {
            return Ok(());
        };
        if self.is_idle() {
            return Ok(());
        }
        refuse_two_places(self, addresses, &[Parameter::ConvStates])?;
        // SAFETY: the caller's promise.
        let launch = unsafe { Launch::new(self, self.check, addresses, memory) }?;
        // SAFETY: the ranges of `touches` are live and locked for the task that runs this; the launch has found that
        // the tensors that are written share no memory with them.
        let numbers = unsafe { self.numbers(addresses, memory) }.map_err(|why| launch.fault(why))?;
        let (runs, shared) = checked_runs(&launch, &self.problem, contents(&numbers))?;
        let elements = |parameter: Parameter, desc: &TensorDesc| ElementView::new(launch.first(parameter), *desc);
        let buffers = Buffers {
            x: elements(Parameter::X, x),
            weight: elements(Parameter::Weight, weight),
            bias: bias.as_ref().map(|bias| elements(Parameter::Bias, bias)),
            lines: elements(Parameter::ConvStates, states),
            y: elements(Parameter::Y, y),
        };
        // SAFETY: the tensors are those of the checked call, whose bytes, those of `touches`, are live (the allocation
        // table let the launch in) and locked for the task that runs this; the launch has found what is written apart
        // from everything else; the runs keep to the rows and to the pool, `ConvProblem::runs` takes none that begins
        // within another's rows, and `shared` says whether two have one line.
        unsafe { causal_conv1d::run(&self.problem, x.dtype, (&runs, shared), &buffers) };
        Ok(())
    }
}

c_functions! {
    causal_conv1d_arguments;
    1 V1: aclnnCausalConv1dGetWorkspaceSize, aclnnCausalConv1d => CausalConvOperator::new;
}
