//! Both phases of a call.

use super::argument::{Argument, Role};
use super::parameter::Arguments;
use super::view::{Views, address, range};
use crate::descriptor::TENSORS;
use crate::elements::{Elements, NamedTensor};
use crate::executor;
use crate::lock::Lock;
use crate::memory::DeviceMemory;
use crate::operator::{Access, Addresses, Operator, TensorPosition};
use crate::ops::entry_point::write_executor;
use crate::sanitizer::allocation_table;
use crate::status::{AICORE_EXCEPTION, Outcome, aclnn, failure};
use crate::trace::Trace;
use crate::trace::value::Value;
use ascend_spec::{Dims, TensorDesc};
use ascend_sys::bindings::{aclOpExecutor, aclTensor, aclrtStream};
use std::ffi::c_void;
use std::ptr::without_provenance;
use std::sync::Arc;

/// The computation of a launch. Its error describes data that the operator cannot compute with.
type Body = Box<dyn Fn(&Views) -> Result<(), String> + Send + Sync>;

/// The shape of an output that depends on the data, with the output's position among the tensors.
type Sized = (usize, Arc<Lock<Option<Vec<i64>>>>);

/// The computation of a call, and the output whose shape it finds, if there is one.
pub(super) struct Work {
    body: Body,
    sized: Option<Sized>,
}

/// Makes work from a closure.
pub(super) fn work(body: impl Fn(&Views) -> Result<(), String> + Send + Sync + 'static) -> Outcome<Work> {
    Ok(Work { body: Box::new(body), sized: None })
}

/// Makes work from a closure that returns the shape of an output.
pub(super) fn work_of_size(
    out: &Argument,
    body: impl Fn(&Views) -> Result<Vec<i64>, String> + Send + Sync + 'static,
) -> Outcome<Work> {
    let shape = Arc::new(Lock::new(None));
    let write = Arc::clone(&shape);
    let body = move |views: &Views| {
        *write.lock() = Some(body(views)?);
        Ok(())
    };
    Ok(Work { body: Box::new(body), sized: Some((out.index, shape)) })
}

/// A call that phase one has accepted.
struct GlueOperator {
    name: &'static str,
    tensors: Vec<Argument>,
    inputs: usize,
    outputs: usize,
    lists: Vec<usize>,
    work: Work,
}

impl GlueOperator {
    /// Source and target, if the call copies the bytes of a tensor unchanged.
    fn plain_copy(&self) -> Option<(&Argument, &Argument)> {
        let [to, from] = self.tensors.as_slice() else {
            return None;
        };
        let alike = to.desc.lies_as(&TensorDesc { offset: to.desc.offset, format: to.desc.format, ..from.desc });
        let plain = alike && to.desc.is_contiguous() && self.name == "aclnnInplaceCopy";
        plain.then_some((from, to))
    }
}

/// All elements of an argument.
fn elements(argument: &Argument, addresses: &Addresses) -> Option<Elements> {
    let tensor = NamedTensor { what: argument.name, address: address(argument.position, addresses) };
    Elements::described(tensor, &argument.desc)
}

impl Operator for GlueOperator {
    fn name(&self) -> &'static str {
        self.name
    }

    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn list(&self, input: usize) -> Option<usize> {
        self.lists.iter().position(|&list| list == input)
    }

    fn tensor(&self, position: TensorPosition) -> Option<&TensorDesc> {
        let argument = self.tensors.iter().find(|argument| argument.position == position);
        argument.map(|argument| &argument.desc)
    }

    fn store_shape(&self, wait: &dyn Fn() -> Outcome) -> Outcome {
        let Some((index, shape)) = &self.work.sized else {
            return Ok(());
        };
        wait()?;
        // After a failed launch there is no shape; its stream reports the failure.
        let shape = shape.lock().take();
        let shape = shape.and_then(|shape| Dims::new(&shape));
        if let (Some(shape), Some(argument)) = (shape, self.tensors.get(*index)) {
            let tensor = TENSORS.get(without_provenance::<aclTensor>(argument.handle))?;
            let mut described = tensor.get();
            described.desc.shape = shape;
            described.desc.strides = shape.contiguous_strides();
            tensor.set(described);
        }
        Ok(())
    }

    fn accesses(&self, addresses: &Addresses, visit: &mut dyn FnMut(Access)) {
        for argument in &self.tensors {
            let range = range(argument, addresses);
            visit(Access {
                address: range.start,
                bytes: range.len() as u64,
                write: argument.role != Role::Read,
                what: argument.name,
            });
        }
    }

    unsafe fn writes(&self, addresses: &Addresses, _: &DeviceMemory, visit: &mut dyn FnMut(&Elements)) {
        // A launch reports the parts that it wrote, and the bytes that it copied, itself.
        let in_parts = |argument: &Argument| argument.writes_parts() || self.plain_copy().is_some();
        let written = self.tensors.iter().filter(|argument| argument.role != Role::Read);
        for elements in
            written.filter(|argument| !in_parts(argument)).filter_map(|argument| elements(argument, addresses))
        {
            visit(&elements);
        }
    }

    unsafe fn run(&self, addresses: &Addresses, memory: &DeviceMemory) -> Outcome {
        let mut outputs = (self.tensors.iter()).filter(|argument| argument.role != Role::Read);
        if self.work.sized.is_none() && outputs.all(|argument| argument.desc.is_empty()) {
            return Ok(());
        }
        // SAFETY: the ranges are those of `accesses`: live (the allocation table let the launch in), and locked for
        // the task that runs this.
        let views = unsafe { Views::new(&self.tensors, addresses, memory) };
        let outcome = views.map_err(String::from).and_then(|views| {
            let outcome = (self.work.body)(&views);
            views.report_parts();
            outcome
        });
        if let Some((from, to)) = self.plain_copy() {
            let (from, to) = (range(from, addresses), range(to, addresses));
            allocation_table::copied(from.start, to.start, to.len());
        }
        outcome.map_err(|why| failure!(AICORE_EXCEPTION, "{}: {why}", self.name))
    }
}

/// Phase one: `check` reads the arguments and returns the work.
///
/// # Safety
///
/// The pointers are null or valid for writing.
pub(super) unsafe fn prepare(
    name: &'static str,
    workspace_size: *mut u64,
    executor: *mut *mut aclOpExecutor,
    check: &mut dyn FnMut(&mut Arguments) -> Outcome<Work>,
) -> i32 {
    // SAFETY: the caller's promise.
    aclnn(|| unsafe { write_executor(workspace_size, executor, || prepared(name, check)) })
}

/// The operator that `check` makes of its arguments, the addresses of its tensors, and whether it needs no workspace.
pub(super) fn prepared(
    name: &'static str,
    check: &mut dyn FnMut(&mut Arguments) -> Outcome<Work>,
) -> Outcome<(impl Operator + 'static, Addresses, bool)> {
    let mut arguments = Arguments::new(name);
    let work = check(&mut arguments)?;
    let Arguments { tensors, addresses, inputs, outputs, lists, .. } = arguments;
    let operator = GlueOperator { name, tensors, inputs, outputs, lists, work };
    // No operator here needs one.
    Ok((operator, addresses, true))
}

/// Phase two.
pub(super) fn launch(
    name: &str,
    workspace: *mut c_void,
    bytes: u64,
    executor: *mut aclOpExecutor,
    stream: aclrtStream,
) -> i32 {
    aclnn(|| executor::launch(name, workspace.addr(), bytes, executor.cast(), stream))
}

/// Writes a call to the trace, and makes it.
///
/// # Safety
///
/// The arguments keep the contract of [`abi`](crate::abi).
#[cold]
pub(super) unsafe fn traced(
    trace: &'static Trace,
    function: &'static str,
    arguments: &[(&'static str, Value)],
    body: &dyn Fn() -> i32,
) -> i32 {
    // SAFETY: the caller's promise.
    let line = unsafe { trace.begin(function, arguments) };
    let status = body();
    // SAFETY: this is what the function returns.
    unsafe { line.end("aclnnStatus", Value::Signed(status.into())) };
    status
}
