#!/usr/bin/env python3
"""Makes the fixtures beside it with an earlier release, whose programs it runs.

How it was run: in a work tree of commit f32c2ed9, `sagas.rs` was copied to `main.rs`, and `../order.rs` beside it, into
`crates/integrations/hapax-saga/examples/fixtures`; then

    cargo build -p hapax-cli
    cargo build -p hapax-saga --example fixtures
    make.py target/debug/hapax target/debug/examples/fixtures CLOCK.so

with CLOCK.so compiled from `clock.c` of the testkit. It needs Redis, PostgreSQL and a NATS server.

Fixtures do not expire. The earlier programs had a clock 60 years ahead when they wrote the files, whose own clock goes on
from there. In the databases, the ends of retentions and of the lease of `/live` were then set 60 years later.
"""

import base64
import http.server
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

HAPAX, SAGAS, CLOCK = (str(pathlib.Path(it).resolve()) for it in sys.argv[1:4])
FIXTURES = pathlib.Path(__file__).resolve().parent.parent / 'fixtures'
SECRET = '11' * 32
AHEAD = 60 * 365 * 86400
# In microseconds.
HALF_AN_HOUR = 1800 * 1000000
# Of the server of the client's calls: it is part of a call.
BANK = ('127.91.7.3', 41999)
JSON = 'application/json'
FORM = 'application/x-www-form-urlencoded'
# Path, key, type and body of each request; the test has the same.
REQUESTS = [
    ('/orders', 'done', JSON, '{"b": 2, "a": 1.0}'),
    ('/orders?b=2&a=1', 'form', FORM, 'a+b=1&c=%20'),
    ('/orders', 'empty', JSON, '{}'),
    ('/orders', 'moved', JSON, '{}'),
    ('/orders', 'large', JSON, '{}'),
    ('/orders', 'seen', JSON, '{}'),
    ('/orders', 'broken', JSON, '{}'),
    ('/live', 'busy', JSON, '{}'),
    ('/orders', 'resolved', JSON, '{}'),
    ('/live', 'denied', JSON, '{}'),
    ('/again', 'again', JSON, '{}'),
    ('/asked', 'asked-yes', JSON, '{}'),
    ('/asked', 'asked-no', JSON, '{}'),
    ('/asked', 'asked-mute', JSON, '{}'),
]
IN_FLIGHT = [('/orders', 'lapsed'), ('/live', 'live'), ('/again', 'again-lapsed'), ('/soon', 'soon-asked')]
arrived = threading.Semaphore(0)
posted = []


class Service(http.server.BaseHTTPRequestHandler):
    """The service behind gateway, consumer, relay and calls."""

    def do_GET(self):
        if self.headers.get('idempotency-key') == 'soon-asked':
            posted.append((self.path, 'soon-asked'))
            self.answer(503, b'')
        else:
            self.answer(404, b'', [('idempotency-outcome', 'did-not-happen')])

    def do_POST(self):
        self.rfile.read(int(self.headers.get('content-length', 0)))
        key = self.headers.get('webhook-id') or self.headers.get('idempotency-key')
        posted.append((self.path, key))
        if key in ('done', 'form'):
            more = [('x-order', '17'), ('link', '</a>'), ('link', '</b>'), ('content-type', 'text/plain')]
            self.answer(201, f'paid by {key} \u00e9'.encode(), more)
        elif key == 'empty':
            self.answer(204, b'')
        elif key == 'moved':
            self.answer(307, b'there', [('location', '/elsewhere')])
        elif key == 'large':
            self.answer(201, b'x' * 2048)
        elif key == 'busy':
            self.answer(429, b'later')
        elif key == 'broken':
            self.close_connection = True
        elif key in [it for _, it in IN_FLIGHT] + ['m-killed'] or self.path == '/hang':
            arrived.release()
            time.sleep(600)
        elif key in ('m-parked', 'o-rejected'):
            self.answer(422, b'no such order')
        elif self.path in ('/orders', '/live', '/again', '/asked'):
            self.answer(500, b'it broke')
        else:
            self.answer(201, b'paid')

    def answer(self, status, body, headers=()):
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204:
            self.send_header('content-length', str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve(address):
    server = http.server.ThreadingHTTPServer(address, Service)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_address[1]


def free_port():
    with socket.socket() as it:
        it.bind(('127.0.0.1', 0))
        return it.getsockname()[1]


def run(*words, **more):
    done = subprocess.run([str(it) for it in words], capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f'{words}: {done.returncode}\n{done.stdout}{done.stderr}')
    return done.stdout


def until(holds):
    while not holds():
        time.sleep(0.1)


def is_ready(port):
    try:
        return urllib.request.urlopen(f'http://127.0.0.1:{port}/readyz').status == 200
    except (OSError, urllib.error.URLError):
        return False


class Store:
    """A store and the environment of the programs that write to it."""

    def __init__(self, folder):
        self.folder = folder
        self.env = {'PATH': os.environ['PATH'], 'HOME': str(folder)}
        self.secret = folder / 'secret'
        self.write_secret(self.secret)
        self.open()

    def write_secret(self, path):
        path.write_text(SECRET + '\n')
        path.chmod(0o600)

    def start(self, service):
        config = self.folder / 'gateway.toml'
        text = (FIXTURES / 'gateway.toml').read_text().replace('UPSTREAM', f'http://127.0.0.1:{service}')
        config.write_text(text)
        listen, admin = free_port(), free_port()
        token = self.folder / 'token'
        process = subprocess.Popen(
            [HAPAX, 'gateway', '--config', config, '--store', self.url, '--secret-file', self.secret, '--listen',
             f'127.0.0.1:{listen}', '--admin', f'127.0.0.1:{admin}', '--admin-token-file', token],
            cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL)
        until(lambda: is_ready(admin))

        def post(path, key, kind=JSON, body='{}'):
            head = {'idempotency-key': key, 'content-type': kind}
            url = f'http://127.0.0.1:{listen}{path}'
            request = urllib.request.Request(url, body.encode(), head, method='POST')
            try:
                urllib.request.build_opener(NoRedirect).open(request)
            except OSError:
                pass

        return process, post, ['--admin', f'127.0.0.1:{admin}', '--admin-token-file', token, '--reason', 'a fixture']

    def gateway(self, service):
        process, post, at = self.start(service)
        for request in REQUESTS:
            post(*request)
        run(HAPAX, 'keys', 'resolve', 'resolved', '--outcome', 'happened', '--status', '202', '--header',
            'x-by: operator', '--body', 'paid by hand', *at, env=self.env, cwd=self.folder)
        run(HAPAX, 'keys', 'resolve', 'denied', '--outcome', 'did-not-happen', *at, env=self.env, cwd=self.folder)
        for request in IN_FLIGHT:
            threading.Thread(target=post, args=request, daemon=True).start()
        for _ in IN_FLIGHT:
            arrived.acquire()
        self.kill(process)
        # A later process is answered by the reconcile URL that it cannot say.
        process, post, _ = self.start(service)
        while ('/by-operation', 'soon-asked') not in posted:
            post('/soon', 'soon-asked')
            time.sleep(0.5)
        time.sleep(1)
        self.kill(process)

    def kill(self, process):
        process.send_signal(signal.SIGKILL)
        process.wait()

    def sagas(self):
        process = subprocess.Popen([SAGAS, self.url, SECRET], env=self.env, text=True, stdout=subprocess.PIPE)
        calls = []
        for line in process.stdout:
            if line == 'ready\n':
                break
            calls.append(line)
        self.kill(process)
        (FIXTURES / 'sagas.calls').write_text(''.join(calls))

    def consume(self, service, database):
        """Three messages: accepted, rejected, and one whose process is killed while it is posted."""
        port = free_port()
        broker = subprocess.Popen(['nats-server', '-a', '127.0.0.1', '-p', str(port), '-js', '-sd', self.folder / 'nats'],
                                  stderr=subprocess.DEVNULL)
        until(lambda: socket.socket().connect_ex(('127.0.0.1', port)) == 0)
        with socket.create_connection(('127.0.0.1', port)) as nats:
            nats.sendall(b'CONNECT {"verbose":false,"headers":true}\r\n')
            made = b'{"name":"ORDERS","subjects":["orders.*"],"storage":"file","retention":"limits","max_age":0}'
            nats.sendall(b'SUB r 1\r\nPUB $JS.API.STREAM.CREATE.ORDERS r %d\r\n%s\r\n' % (len(made), made))
            for name in ('m-handled', 'm-parked', 'm-killed'):
                head, body = f'NATS/1.0\r\nmessage-id: {name}\r\n\r\n'.encode(), f'of {name}'.encode()
                nats.sendall(b'HPUB orders.created r %d %d\r\n%s%s\r\n' % (len(head), len(head) + len(body), head, body))
            admin = free_port()
            process = subprocess.Popen(
                [HAPAX, 'consume', '--from', f'nats://127.0.0.1:{port}', '--stream', 'ORDERS', '--consumer', 'invoices',
                 '--to', f'http://127.0.0.1:{service}/invoices', '--store', self.url, '--secret-file', self.secret,
                 '--database', database, '--lease', '1s', '--retention', '36500d', '--admin',
                 f'127.0.0.1:{admin}'],
                cwd=self.folder, env=self.env, stdout=subprocess.DEVNULL)
            arrived.acquire()
            until(lambda: ('/invoices', 'm-parked') in posted)
            time.sleep(2)
            self.kill(process)
        posted.clear()
        self.kill(broker)

    def save_identity(self):
        _, rest = (self.folder / 'secret.stores').read_text().split('\t', 1)
        (FIXTURES / f'{self.name}.stores').write_text(f'STORE\t{rest}')


class NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


class File(Store):
    name = 'file'

    def open(self):
        self.path = self.folder / 'hapax.db'
        self.url = f'file:{self.path}'
        ahead = self.folder / 'ahead'
        ahead.write_text(f'{AHEAD:+022d}')
        self.env |= {'LD_PRELOAD': CLOCK, 'HAPAX_TEST_CLOCK': str(ahead)}

    def call(self, journal, name, url, *more):
        words = [HAPAX, 'call', '--journal', journal, '--name', name, '--data', name, *more, 'POST', url]
        return subprocess.Popen(words, env=self.env, cwd=self.folder, stdout=subprocess.PIPE)

    def calls(self):
        """A journal: an operation that is done, one whose process was killed, and one that may not be repeated."""
        journal = self.folder / 'calls.db'
        self.write_secret(self.folder / 'calls.db.secret')
        bank = f'http://{BANK[0]}:{BANK[1]}'
        plain = ['--server', 'plain', '--retention', '3653d']
        done = self.call(journal, 'paid', f'{bank}/pay', *plain)
        assert done.communicate()[0] == b'paid' and done.returncode == 0
        for name, more in (('unfinished', plain), ('once', [])):
            process = self.call(journal, name, f'{bank}/hang', *more)
            arrived.acquire()
            self.kill(process)
        key = next(key for path, key in posted if path == '/hang')
        (FIXTURES / 'calls.key').write_text(key + '\n')
        posted.clear()
        self.save_file(journal, 'calls.db')

    def save_file(self, path, name):
        """Writes the length of a file, and offset and bytes of each part that is not zero, in base64."""
        content, parts, end = path.read_bytes(), [], -1
        for at in range(0, len(content), 48):
            part = content[at:at + 48]
            if part.strip(b'\0'):
                if at != end:
                    parts.append((at, []))
                parts[-1][1].append(part)
                end = at + len(part)
        lines = [f'{at} {base64.b64encode(b"".join(part)).decode()}\n' for at, part in parts]
        (FIXTURES / f'{name}.parts').write_text(f'{len(content)}\n' + ''.join(lines))

    def save(self):
        self.save_file(self.path, 'hapax.db')
        self.save_identity()


class Redis(Store):
    name = 'redis'

    def open(self):
        self.port = free_port()
        self.server = subprocess.Popen(['redis-server', '--port', str(self.port), '--bind', '127.0.0.1', '--save', ''],
                                       cwd=self.folder, stdout=subprocess.DEVNULL)
        self.url = f'redis://127.0.0.1:{self.port}'
        until(lambda: socket.socket().connect_ex(('127.0.0.1', self.port)) == 0)

    def command(self, *words):
        words = [it if isinstance(it, bytes) else str(it).encode() for it in words]
        with socket.create_connection(('127.0.0.1', self.port)) as it:
            it.sendall(b'*%d\r\n' % len(words) + b''.join(b'$%d\r\n%s\r\n' % (len(w), w) for w in words))
            return self.reply(it.makefile('rb'))

    def reply(self, stream):
        line = stream.readline()[:-2]
        kind, rest = line[:1], line[1:]
        if kind == b'$':
            return stream.read(int(rest) + 2)[:-2]
        if kind == b'*':
            return [self.reply(stream) for _ in range(int(rest))]
        return rest

    def save(self):
        """Writes commands, a line each, whose words are in hexadecimal digits."""
        lines, now = [], int(time.time() * 1000000)
        for key in sorted(self.command('KEYS', '*')):
            kind = self.command('TYPE', key)
            if kind == b'string':
                lines.append([b'SET', key, shifted(self.command('GET', key), now)])
            elif kind == b'hash':
                lines.append([b'HSET', key, *self.command('HGETALL', key)])
            elif kind == b'zset':
                found = self.command('ZRANGE', key, 0, -1, 'WITHSCORES')
                lines.append([b'ZADD', key, *(it for at in range(0, len(found), 2) for it in (found[at + 1], found[at]))])
            else:
                raise SystemExit(f'{key}: {kind}')
        text = ''.join(' '.join(word.hex() for word in line) + '\n' for line in lines)
        (FIXTURES / 'redis.hex').write_text(text)
        self.save_identity()
        self.kill(self.server)


def shifted(value, now):
    """A record with its times 60 years later: of the lease, if it is that of `/live`; of retention and removal, if any."""
    if not value.startswith(b'hxc1'):
        return value
    lease, keep, due = (int(value[at:at + 16]) for at in (36, 52, 68))
    lease += AHEAD * 1000000 if HALF_AN_HOUR < lease - now < 4 * HALF_AN_HOUR else 0
    keep, due = (it if it == 9999999999999999 else it + AHEAD * 1000000 for it in (keep, due))
    return value[:36] + b'%016d%016d%016d' % (lease, keep, due) + value[84:]


class Postgres(Store):
    name = 'postgres'

    def open(self):
        programs = pathlib.Path(shutil.which('pg_config') and run('pg_config', '--bindir').strip() or
                                sorted(pathlib.Path('/usr/lib/postgresql').glob('*/bin'))[-1])
        self.programs, self.port, data = programs, free_port(), self.folder / 'data'
        self.as_user = []
        if os.geteuid() == 0:
            self.as_user = ['setpriv', '--reuid=nobody', '--clear-groups']
            run('chown', 'nobody', self.folder)
        run(*self.as_user, programs / 'initdb', '-D', data, '-A', 'trust', '-U', 'postgres', '--locale=C', '-E', 'UTF8')
        self.server = subprocess.Popen(
            [*self.as_user, programs / 'postgres', '-D', data, '-p', str(self.port), '-k', self.folder, '-c',
             'listen_addresses=127.0.0.1'], stderr=subprocess.DEVNULL)
        self.url = f'postgres://postgres@127.0.0.1:{self.port}/postgres'
        until(lambda: subprocess.run(['psql', self.url, '-c', ''], capture_output=True).returncode == 0)

    def sql(self, text):
        return run('psql', self.url, '-v', 'ON_ERROR_STOP=1', '-At', '-f', '-', input=text)

    def messages(self, service):
        """Tables of messages: an id that was handled, a gap, a position, and an outbox with a dead letter."""
        self.sql("SELECT hapax_inbox('invoices', ARRAY['b-handled'], ARRAY['\\x01'::bytea], '36500 days')")
        self.sql("SELECT hapax_inbox_attempt('invoices', 'b-tried', '36500 days')")
        for number in (1, 3):
            self.sql(f"SELECT hapax_sequence('invoices', 'order-1', {number}, 's-{number}', '{{}}', 'of s-{number}', 10, "
                     "'36500 days', 'fetch')")
        self.sql("SELECT hapax_position_acquire('invoices', 'orders', 0, 0)")
        self.sql("SELECT hapax_position_set('invoices', 'orders', 0, 42)")
        put = "SELECT hapax_outbox_put('orders.created', 'of {0}', '{1}', '{0}', '{{\"content-type\": \"text/plain\"}}')"
        self.sql(put.format('o-rejected', 'order-1'))
        admin = free_port()
        relay = subprocess.Popen(
            [HAPAX, 'relay', '--from', self.url, '--to', f'http://127.0.0.1:{service}/hooks', '--secret-file', self.secret,
             '--admin', f'127.0.0.1:{admin}', '--lease', '1s'], cwd=self.folder, env=self.env)
        until(lambda: self.sql('SELECT count(*) FROM hapax_outbox').strip() == '0')
        self.kill(relay)
        self.sql(put.format('o-blocked', 'order-1'))
        self.sql(put.format('o-waiting', 'order-2'))

    def save(self):
        micros, now = AHEAD * 1000000, int(time.time() * 1000000)
        self.sql(f'UPDATE hapax_cells SET lease_until = lease_until + {micros} '
                 f'WHERE lease_until - {now} BETWEEN {HALF_AN_HOUR} AND {4 * HALF_AN_HOUR}')
        self.sql(f'UPDATE hapax_cells SET sweep_at = sweep_at + {micros}, due_at = due_at + {micros}, '
                 f'keep_until = keep_until + {micros}')
        dump = run(self.programs / 'pg_dump', self.url, '--inserts', '--no-owner', '--no-privileges')
        lines = [it for it in dump.splitlines() if it and not it.startswith(('--', '\\'))]
        (FIXTURES / 'postgres.sql').write_text('\n'.join(lines) + '\n')
        self.save_identity()
        self.kill(self.server)


def main():
    service = serve(('127.0.0.1', 0))
    serve(BANK)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)

        def place(name):
            path = pathlib.Path(folder) / name
            path.mkdir()
            return path

        database = Postgres(place('postgres'))
        database.sql(run(HAPAX, 'messages', 'migrations'))
        file, redis = File(place('file')), Redis(place('redis'))
        for store in (file, redis, database):
            store.gateway(service)
            store.sagas()
            store.consume(service, database.url)
            if store is not database:
                database.sql('TRUNCATE hapax_dead_letters')
        file.calls()
        database.messages(service)
        for store in (file, redis, database):
            store.save()


main()
