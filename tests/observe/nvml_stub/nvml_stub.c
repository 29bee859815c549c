/* A stand-in for libnvidia-ml.so.1: GPUs whose numbers, errors and hangs the tests set through stub_*. */

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define GPUS 16
#define HANG_MS 120000 /* a call that is held comes back in the end, so that a broken test ends too */

enum function { INIT, UTILISATION, MEMORY, MEMORY_V2, POWER, TEMPERATURE, THROTTLE, FUNCTIONS };
enum code { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_FOUND = 6 };

struct gpu {
    char uuid[96];
    char name[96];
    unsigned value[FUNCTIONS];
    int code[FUNCTIONS];
    volatile int held[FUNCTIONS];
    int calls[FUNCTIONS];
};

static struct gpu gpus[GPUS];
static int count;
static int init_code, open_count;
static volatile int init_held;

static void wait_while(volatile int *held) {
    for (int waited = 0; *held && waited < HANG_MS; waited++) usleep(1000);
}

void stub_reset(void) {
    memset(gpus, 0, sizeof gpus);
    count = init_code = init_held = open_count = 0;
}
int stub_add(const char *uuid, const char *name) {
    snprintf(gpus[count].uuid, sizeof gpus[count].uuid, "%s", uuid);
    snprintf(gpus[count].name, sizeof gpus[count].name, "%s", name);
    return count++;
}
void stub_init(int code, int held) { init_code = code; init_held = held; }
void stub_value(int gpu, int function, unsigned value) { gpus[gpu].value[function] = value; }
void stub_code(int gpu, int function, int code) { gpus[gpu].code[function] = code; }
void stub_hold(int gpu, int function, int held) { gpus[gpu].held[function] = held; }
int stub_calls(int gpu, int function) { return gpus[gpu].calls[function]; }
int stub_open(void) { return open_count; }

static int call(struct gpu *gpu, enum function function) {
    gpu->calls[function]++;
    wait_while(&gpu->held[function]);
    return gpu->code[function];
}

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    wait_while(&init_held);
    if (!init_code) open_count++;
    return init_code;
}
int nvmlShutdown(void) { open_count--; return SUCCESS; }
const char *nvmlErrorString(int code) {
    switch (code) {
    case 3: return "Not Supported";
    case 6: return "Not Found";
    case 9: return "Driver Not Loaded";
    case 15: return "GPU is lost";
    default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "999.1"); return SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *found) { *found = count; return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct gpu **handle) {
    if ((int)index >= count) return INVALID_ARGUMENT;
    *handle = &gpus[index];
    return SUCCESS;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, struct gpu **handle) {
    for (int index = 0; index < count; index++)
        if (!strcmp(gpus[index].uuid, uuid)) {
            *handle = &gpus[index];
            return SUCCESS;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetUUID(struct gpu *gpu, char *text, unsigned size) { snprintf(text, size, "%s", gpu->uuid); return SUCCESS; }
int nvmlDeviceGetName(struct gpu *gpu, char *text, unsigned size) { snprintf(text, size, "%s", gpu->name); return SUCCESS; }

struct utilisation { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(struct gpu *gpu, struct utilisation *out) {
    out->gpu = gpu->value[UTILISATION];
    out->memory = 0;
    return call(gpu, UTILISATION);
}
struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(struct gpu *gpu, struct memory *out) {
    out->total = 100000000000ull;
    out->used = gpu->value[MEMORY] * 1000000ull;
    out->free = out->total - out->used;
    return call(gpu, MEMORY);
}
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(struct gpu *gpu, struct memory_v2 *out) {
    if (out->version != (sizeof *out | (2u << 24))) return INVALID_ARGUMENT;
    out->total = 100000000000ull;
    out->reserved = 0;
    out->used = gpu->value[MEMORY_V2] * 1000000ull;
    out->free = out->total - out->used;
    return call(gpu, MEMORY_V2);
}
int nvmlDeviceGetPowerUsage(struct gpu *gpu, unsigned *milliwatts) {
    *milliwatts = gpu->value[POWER];
    return call(gpu, POWER);
}
int nvmlDeviceGetTemperature(struct gpu *gpu, int sensor, unsigned *degrees) {
    (void)sensor;
    *degrees = gpu->value[TEMPERATURE];
    return call(gpu, TEMPERATURE);
}
int nvmlDeviceGetCurrentClocksEventReasons(struct gpu *gpu, unsigned long long *reasons) {
    *reasons = gpu->value[THROTTLE];
    return call(gpu, THROTTLE);
}
