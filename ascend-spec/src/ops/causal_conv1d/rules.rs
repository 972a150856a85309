//! The rules of CausalConv1d.

use super::Version;
use crate::rule::rules;

rules! {
    in Scope::ALL.since(V8_5);
    PRODUCT = "causal_conv.product", FIND_KERNEL_ERROR, V1, "CausalConv1d package, products" in Scope::ALL,
        "the package is made for the product and the release",
        "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer, or on Ascend 950 with 9.0 or newer";
    REQUIRED = "causal_conv.required", TILING_ERROR, V1, "CausalConv1d package, inputs",
        "x, weight, convStates and y are given",
        "pass rows, weights, a pool of lines and an output";
    MODE = "causal_conv.mode", TILING_ERROR, V1, "CausalConv1d package, attributes",
        "activationMode and runMode are 0 or 1",
        "pass 1 for SiLU or 0 for none; as runMode 0 for prompts or 1 for decoding";
    DTYPE = "causal_conv.dtype", TILING_ERROR, V1, "CausalConv1d package, dtypes",
        "x, weight, bias, convStates and y are all FLOAT16 or all BF16, queryStartLoc, cacheIndices and "
        "numAcceptedTokens INT32, initialStateMode BOOL, INT32 or INT64",
        "convert the named tensor to one of the allowed dtypes";
    format of "causal_conv", TILING_ERROR, "CausalConv1d package, formats";
    CONTIGUOUS = "causal_conv.contiguous", TILING_ERROR, V1, "CausalConv1d package, which does not say",
        "convStates and y are contiguous: what a build of the package does with views of them is not known",
        "pass tensors of their own, and copy to where the view is";
    RANK = "causal_conv.rank", TILING_ERROR, V1, "CausalConv1d package, shapes",
        "x has 2 or 3 axes, weight 2, convStates 3, cacheIndices 1 or 2, the other tensors 1",
        "describe the tensor with as many axes";
    CHANNELS = "causal_conv.channels", TILING_ERROR, V1, "CausalConv1d package, shapes",
        "a row has a multiple of 16 elements",
        "pad the channels of rows, weights and lines to a multiple of 16";
    WIDTH = "causal_conv.width", TILING_ERROR, V1, "CausalConv1d package, shapes",
        "a window has 2 to 4 rows",
        "pass weights [W, channels], transposed from a model's [channels, W]; zero-pad those of 1 row in front to 2 "
        "rows, and sum the products of a wider window on the host";
    SHAPE = "causal_conv.shape", TILING_ERROR, V1, "CausalConv1d package, shapes",
        "weight, bias, convStates and y have the channels of x, y its shape, and queryStartLoc, cacheIndices, "
        "initialStateMode and numAcceptedTokens the sequences of the call",
        "give tensors of the same rows, channels and sequences";
    EMPTY = "causal_conv.empty", TILING_ERROR, V1, "CausalConv1d package, shapes",
        "there are sequences, and rows in each of x [B, L, dim]",
        "leave the call out where there is nothing to compute";
    LINES = "causal_conv.lines", TILING_ERROR, V1, "CausalConv1d package, convStates",
        "there are lines, without cacheIndices one for each sequence",
        "give the pool a line for each sequence, or say by cacheIndices which lines are meant";
    LINE_ROWS = "causal_conv.line_rows", TILING_ERROR, V1, "CausalConv1d package, convStates",
        "a line has a row for each of a window but the last, with numAcceptedTokens and x [B, L, dim] L + 2",
        "make the pool with longer lines";
    STARTS = "causal_conv.starts", TILING_ERROR, V1, "CausalConv1d package, queryStartLoc",
        "queryStartLoc is given in mode 0 with x [T, dim]",
        "give the number of each sequence's first row, and behind them that of all rows";
    HISTORY = "causal_conv.history", TILING_ERROR, V1, "CausalConv1d package, initialStateMode",
        "initialStateMode is null in mode 1, in which every sequence goes on from its line",
        "leave initialStateMode out, or compute in mode 0";
    ACCEPTED = "causal_conv.accepted", TILING_ERROR, V1, "CausalConv1d package, numAcceptedTokens",
        "numAcceptedTokens is given in mode 1 of width 4 alone",
        "leave numAcceptedTokens out, and keep the lines behind accepted rows yourself";
    CONTENTS = "causal_conv.contents", Overrun("rows of other memory are read or written"), V1,
        "CausalConv1d package, kernel",
        "queryStartLoc begins with 0, does not decrease and ends with the rows of x, and accepted counts are those "
        "of a line's rows",
        "make starts and counts from one batch";
    LEFT_OUT = "causal_conv.left_out", Lint("rows of y keep what was there, or a line what it had"), V1,
        "CausalConv1d package, kernel",
        "each sequence has a line of the pool, which has room for its rows where there are accepted counts",
        "give each sequence a line, and leave sequences without rows out of the call";
    SHARED = "causal_conv.shared_line", Lint("a line that is read may be another than is meant"), V1,
        "CausalConv1d package, kernel",
        "no two sequences name one line",
        "give each sequence a line of its own, and copy one that two sequences begin with";
}
