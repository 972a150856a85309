/* A client that looks operators up, says in the log which it did not find, and compiles it by its name instead; it also
   asks for what kernels of its own need, and calls an operator that it found. */

#include <stdint.h>
#include <stdio.h>

#include "acl/acl.h"

/* CANN declares these in headers for its own components. */
void aclAppLog(int level, const char *function, const char *file, uint32_t line, const char *format, ...);
int aclSetCompileopt(int option, const char *value);
int rtGetC2cCtrlAddr(uint64_t *address, uint32_t *length);
/* Declared without its parameters: it looks at none. */
int aclnnGroupedMatmulV4GetWorkspaceSize(void);

static void compile_at_once(void) {
    const int jit_compile = 10;
    int status = aclSetCompileopt(jit_compile, "enable");
    printf("%d %s\n", status, aclGetRecentErrMsg());
}

int main(void) {
    compile_at_once();
    aclAppLog(2, __func__, __FILE__, __LINE__,
              "[PTA]:%s or %sGetWorkspaceSize not in %s, or %s not found. Will call %s", "aclnnErf", "aclnnErf",
              "libopapi.so", "libopapi.so", "acl_op::erf(self)");
    aclAppLog(2, __func__, __FILE__, __LINE__, "[PTA]:%d of %d bytes", 3, 4);
    compile_at_once();
    compile_at_once();
    /* Its first version is there, and called instead. */
    aclAppLog(2, __func__, __FILE__, __LINE__, "[PTA]:%s or %sGetWorkspaceSize not in %s", "aclnnDynamicQuantV2",
              "aclnnDynamicQuantV2", "libopapi.so");
    compile_at_once();
    uint64_t address = 5;
    uint32_t length = 6;
    int status = rtGetC2cCtrlAddr(&address, &length);
    printf("%d %d %d %s\n", status, (int)address, (int)length, aclGetRecentErrMsg());
    status = aclnnGroupedMatmulV4GetWorkspaceSize();
    printf("%d %s\n", status, aclGetRecentErrMsg());
    printf("done\n");
    return 0;
}
